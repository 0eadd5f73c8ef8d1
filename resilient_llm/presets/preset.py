"""One provider's settings: policies to copy, and the limits it publishes.

What is special about a provider stands in `providers`. Nothing is decided here while a call runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from resilient_llm._options import flag, instance_of, label
from resilient_llm.credentials import Credential
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies import (
    AttemptTimeout,
    CircuitBreaker,
    ConcurrencyLimit,
    Deadline,
    Limit,
    RateLimit,
    Retry,
)
from resilient_llm.policies._keyed import Key
from resilient_llm.pricing import Price
from resilient_llm.target import Target

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from resilient_llm.call import Policy

__all__ = ["Preset", "Source", "copy", "named", "tabulate"]

Named = TypeVar("Named")
Pattern = TypeVar("Pattern", bound="DataclassInstance")

_PER_MODEL: Key = ("target", "model")
_ANY_MODEL = "*"

_LIMIT_OPTIONS = frozenset(option.name for option in fields(Limit))
_NUMBERS = frozenset({"requests_per_minute", "tokens_per_minute", "burst"})


class Source(NamedTuple):
    """Say where numbers come from: a page, the date it says of itself or was copied on, and when we read the copy."""

    about: str
    url: str
    as_of: date | None
    read_on: date


@dataclass(frozen=True, kw_only=True, eq=False)
class Preset:
    """Make policies that suit a provider; each method makes a new one, with any of its options overridden.

    `circuit`, `retries` and `concurrency` are patterns, copied and never used themselves. `tiers` are the limits the
    provider publishes, by account tier and by model (`*`: any); an account may have others, and its console tells.
    With `paced` a second's worth of requests is all that passes at once, for providers that count by the second.
    `provider`, `dialect` and `url` are those of a target there, and `openai_url` is where it speaks OpenAI's dialect
    besides; without a `url` it has to be told.
    `note` says what the numbers do not, and `sources` where each of them comes from.
    """

    name: str
    provider: str | None = None
    dialect: str | None = None
    url: str | None = None
    openai_url: str | None = None
    circuit: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(key=_PER_MODEL))
    retries: Retry = field(default_factory=Retry)
    concurrency: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit(max=1000, key=_PER_MODEL))
    tiers: Mapping[str, Mapping[str, Limit]] = field(default_factory=dict)
    paced: bool = False
    note: str = ""
    sources: Sequence[Source] = ()

    def __post_init__(self) -> None:
        label(name=self.name)
        for option in ("provider", "dialect", "url", "openai_url"):
            if getattr(self, option) is not None:
                label(**{option: getattr(self, option)})
        instance_of(CircuitBreaker, circuit=self.circuit)
        instance_of(Retry, retries=self.retries)
        instance_of(ConcurrencyLimit, concurrency=self.concurrency)
        flag(paced=self.paced)
        instance_of(str, note=self.note)
        if isinstance(self.sources, str) or not isinstance(self.sources, Sequence):
            raise ConfigurationError(f"sources={self.sources!r}: allowed are lists of Source objects")
        for index, source in enumerate(self.sources):
            instance_of(Source, none=False, **{f"sources[{index}]": source})
        instance_of(Mapping, tiers=self.tiers)
        for tier, models in self.tiers.items():
            instance_of(Mapping, none=False, **{f"tiers[{tier!r}]": models})
            for model, limit in models.items():
                instance_of(Limit, none=False, **{f"tiers[{tier!r}][{model!r}]": limit})

    def circuit_breaker(self, **overrides: object) -> CircuitBreaker:
        """Make a `CircuitBreaker`, one circuit for each model of the provider."""
        return copy(self.circuit, overrides)

    def retry(self, **overrides: object) -> Retry:
        """Make a `Retry` that tries as often, and backs off as long, as the provider's SDK or its documentation."""
        return copy(self.retries, overrides)

    def concurrency_limit(self, **overrides: object) -> ConcurrencyLimit:
        """Make a `ConcurrencyLimit` that finds out by itself how much the provider can take."""
        return copy(self.concurrency, overrides)

    def limit(self, *, tier: str | None = None, model: str | None = None, **overrides: object) -> Limit:
        """Give the `Limit` on a model in an account tier, or one of numbers of your own.

        `model` may be left out where the tier has one limit for all. Raises `ConfigurationError` for names that the
        preset does not know, with those it does.
        """
        if tier is not None:
            found = self._published(tier, model)
        elif model is None and not _NUMBERS.isdisjoint(overrides):
            found = Limit(key=_PER_MODEL, requests_per_minute=1)
            overrides = {"requests_per_minute": None, **overrides}
        else:
            known = f"a tier, of {_listed(self.tiers)}, or " if self.tiers else ""
            raise ConfigurationError(
                f"tier=None, model={model!r}: give {known}numbers of your own, without a model, for {self.name}"
            )
        requests = overrides.get("requests_per_minute", found.requests_per_minute)
        if self.paced and isinstance(requests, int | float):
            overrides = {"burst": requests / 60, **overrides}
        return copy(found, overrides)

    def _published(self, tier: str, model: str | None) -> Limit:
        models = named(self.tiers, f"tier of {self.name}", tier)
        if _ANY_MODEL in models:
            return models[_ANY_MODEL]
        if model is not None:
            return named(models, f"model of {self.name} {tier}", model)
        if len(set(models.values())) == 1:
            return next(iter(models.values()))
        raise ConfigurationError(f"model=None: limits of {self.name} {tier} are those of {_listed(models)}")

    def rate_limit(
        self,
        *,
        tier: str | None = None,
        model: str | None = None,
        limits: Sequence[Limit] = (),
        **overrides: object,
    ) -> RateLimit:
        """Make a `RateLimit` of `limit(...)`, and of any more `limits`, such as one for each tenant.

        `overrides` are options of `Limit` and of `RateLimit`.
        """
        numbers = {name: value for name, value in overrides.items() if name in _LIMIT_OPTIONS}
        options = {name: value for name, value in overrides.items() if name not in _LIMIT_OPTIONS}
        return copy(RateLimit(limits=(self.limit(tier=tier, model=model, **numbers), *limits)), options)

    def policies(
        self,
        *,
        tier: str | None = None,
        model: str | None = None,
        deadline: float = 600.0,
        retry: Retry | None = None,
        rate_limit: RateLimit | None = None,
        concurrency_limit: ConcurrencyLimit | None = None,
        circuit_breaker: CircuitBreaker | None = None,
    ) -> list[Policy]:
        """Make the policies of a client, in order; those that are given stand in for the preset's.

        `deadline` is in seconds, by default as many as the OpenAI and Anthropic SDKs wait for one reply; a shorter
        one is inherited from the request a call is made for. There is a `RateLimit` only with `tier` or `rate_limit`.
        """
        instance_of(Retry, none=True, retry=retry)
        _check_kinds(rate_limit, concurrency_limit, circuit_breaker)
        if rate_limit is None and not (tier is None and model is None):
            rate_limit = self.rate_limit(tier=tier, model=model)
        elif not (tier is None and model is None):
            raise ConfigurationError(f"rate_limit= and tier={tier!r}, model={model!r} exclude each other")
        return [
            Deadline(deadline),
            retry or self.retry(),
            *([] if rate_limit is None else [rate_limit]),
            concurrency_limit or self.concurrency_limit(),
            circuit_breaker or self.circuit_breaker(),
        ]

    def target(
        self,
        *,
        model: str | None = None,
        credential: Credential | None = None,
        credentials: Sequence[Credential] = (),
        url: str | None = None,
        name: str | None = None,
        dialect: str | None = None,
        auth: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        api_version: str | None = None,
        weight: float = 1.0,
        price: Price | None = None,
        context_window: int | None = None,
        capabilities: Collection[str] | None = None,
        tier: str | None = None,
        rate_limit: RateLimit | None = None,
        concurrency_limit: ConcurrencyLimit | None = None,
        circuit_breaker: CircuitBreaker | None = None,
        attempt_timeout: AttemptTimeout | None = None,
    ) -> Target:
        """Make a `Target` at the provider, with limits and a circuit of its own.

        They are the preset's unless given; there is a `RateLimit` only with `rate_limit`, or with `tier` for the
        limits of `model` in it, and an `AttemptTimeout` only if given. Its name is that of preset and model. All
        else is as for `Target`. Raises `ConfigurationError` for options that cannot be.
        """
        _check_kinds(rate_limit, concurrency_limit, circuit_breaker)
        instance_of(AttemptTimeout, none=True, attempt_timeout=attempt_timeout)
        if url is None:
            url = self.openai_url if dialect == "openai" and self.openai_url else self.url
        if url is None:
            raise ConfigurationError(
                f"url=None: a target of preset {self.name!r} needs the URL of your own deployment"
            )
        if rate_limit is None and tier is not None:
            rate_limit = self.rate_limit(tier=tier, model=model)
        elif tier is not None:
            raise ConfigurationError(f"rate_limit= and tier={tier!r} exclude each other")
        return Target(
            name=name or "/".join(part for part in (self.name, model) if part),
            url=url,
            provider=self.provider,
            dialect=dialect or self.dialect,
            model=model,
            credential=credential,
            credentials=credentials,
            auth=auth,
            headers=headers,
            api_version=api_version,
            weight=weight,
            price=price,
            context_window=context_window,
            capabilities=capabilities,
            policies=[
                *([] if rate_limit is None else [rate_limit]),
                concurrency_limit or self.concurrency_limit(),
                circuit_breaker or self.circuit_breaker(),
                *([] if attempt_timeout is None else [attempt_timeout]),
            ],
        )


def _check_kinds(rate_limit: object, concurrency_limit: object, circuit_breaker: object) -> None:
    instance_of(RateLimit, none=True, rate_limit=rate_limit)
    instance_of(ConcurrencyLimit, none=True, concurrency_limit=concurrency_limit)
    instance_of(CircuitBreaker, none=True, circuit_breaker=circuit_breaker)


def copy(pattern: Pattern, overrides: Mapping[str, object]) -> Pattern:
    """Make another of a policy, with state of its own."""
    return replace(pattern, **overrides)


def named(things: Mapping[str, Named], kind: str, name: str) -> Named:
    """Give the thing of a name; raise `ConfigurationError` with the names there are when there is none."""
    try:
        return things[name]
    except (KeyError, TypeError):  # the latter for what can be no key at all
        known = _listed(things) if things else "none published"
        raise ConfigurationError(f"{name!r} is no {kind}: {known}") from None


def tabulate(
    *rows: tuple[str, Mapping[str, tuple[float, float | None]]],
) -> Mapping[str, Mapping[str, Limit]]:
    """Turn rows of models, each with requests and tokens a minute by tier, into limits by tier and model.

    Models of a row are set apart by spaces; those joined by `+` share one limit.
    """
    tiers: dict[str, dict[str, Limit]] = {}
    for models, numbers in rows:
        for tier, (requests, tokens) in numbers.items():
            for pool in models.split():
                members = pool.split("+")
                key: Key = _PER_MODEL if len(members) == 1 and pool != _ANY_MODEL else "target"
                limit = Limit(key=key, requests_per_minute=requests, tokens_per_minute=tokens)
                tiers.setdefault(tier, {}).update(dict.fromkeys(members, limit))
    return MappingProxyType({tier: MappingProxyType(models) for tier, models in tiers.items()})


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
