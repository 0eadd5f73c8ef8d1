"""Targets and models of a configuration, as the router's.

What a table says becomes options of the library's own; which target answers is the router's to decide.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient_llm.credentials import Credential
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies import AttemptTimeout, CircuitBreaker, ConcurrencyLimit, RateLimit
from resilient_llm.presets import get
from resilient_llm.pricing import Price
from resilient_llm.sidecar.problems import at
from resilient_llm.target import Target

if TYPE_CHECKING:
    from resilient_llm.call import Policy
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.parts import Parts
    from resilient_llm.sidecar.tables import ModelTarget, PriceOptions, TargetOptions
    from resilient_llm.stores import RedisStore

__all__ = ["Targets"]

_WITH_CREDENTIALS = re.compile(r"[^/?#]*//[^/?#]*@")


class _Named(NamedTuple):
    """A target of the configuration as it is for one of its models."""

    base: Target
    changes: Mapping[str, object]
    target: Target


class Targets:
    """Make each target of a configuration once, and one more for each other model that it is asked for."""

    def __init__(self, config: Config, parts: Parts, store: RedisStore | None) -> None:
        self._config = config
        self._parts = parts
        self._store = store
        self._weights = {name: tenant.weight for name, tenant in config.tenants.items()}
        self._named: dict[str, _Named] = {}
        self.by_name: Mapping[str, Target] = {name: self._target(name) for name in config.targets}

    def models(self) -> dict[str, list[Target]]:
        """Give the equivalent targets of each model."""
        return {
            name: [self._of_model(name, index, one) for index, one in enumerate(model.targets)]
            for name, model in self._config.models.items()
        }

    def circuits(self) -> dict[str, list[tuple[str, CircuitBreaker]]]:
        """Give, for each target of the configuration, the circuits it has and what it is called in them."""
        found: dict[str, list[tuple[str, CircuitBreaker]]] = {name: [] for name in self.by_name}
        for base, target in self.all():
            found[base] += [
                (target.name, policy) for policy in target.policies if isinstance(policy, CircuitBreaker)
            ]
        return found

    def all(self) -> list[tuple[str, Target]]:
        """Give every target there is, with what it is called in the configuration."""
        return [*self.by_name.items(), *((one.base.name, one.target) for one in self._named.values())]

    def _target(self, name: str) -> Target:
        options = self._config.targets[name]
        with at("targets", name, given=options):
            return self._parts.keep(
                f"targets.{name}",
                (options, self._weights, self._config.store),
                lambda: self._make(name, options),
            )

    def _make(self, name: str, options: TargetOptions) -> Target:
        preset = None if options.preset is None else get(options.preset)
        url = options.url
        dialect: str | None = options.dialect
        if preset is not None:
            dialect = dialect or preset.dialect
            url = url or (
                preset.openai_url if options.dialect == "openai" and preset.openai_url else preset.url
            )
            if url is None:
                raise ValueError(f"preset {options.preset} needs the url of your own deployment")
        if url is not None and _WITH_CREDENTIALS.match(url):
            raise ValueError(
                "url=...: has credentials in it; a key is put in an environment variable that api_key_env names"
            )
        return Target(
            name=name,
            url=url,
            provider=options.provider or (None if preset is None else preset.provider),
            dialect=dialect,
            model=options.model,
            credentials=_credentials(name, options.api_key_env),
            auth=options.auth,
            headers=options.headers,
            api_version=options.api_version,
            weight=options.weight,
            price=_price(options.price),
            context_window=options.context_window,
            capabilities=options.capabilities,
            policies=self._policies(name, options),
        )

    def _policies(self, name: str, options: TargetOptions) -> list[Policy]:
        preset = None if options.preset is None else get(options.preset)
        policies: list[Policy] = []
        limits: dict[str, Any] = {"name": f"target.{name}"}
        if self._store is not None and self._shares("quotas"):
            limits["store"] = self._store
        if options.quota is not None:
            with at("targets", name, "quota", given=options.quota):
                limit: dict[str, Any] = options.quota.given()
                policies.append(RateLimit(key="target", weights=self._weights, **limits, **limit))
        elif options.tier is not None and preset is not None:
            with at("targets", name, "tier"):
                policies.append(preset.rate_limit(tier=options.tier, model=options.model, **limits))
        if options.concurrency.enabled:
            with at("targets", name, "concurrency", given=options.concurrency):
                most: dict[str, Any] = {"weights": self._weights, **options.concurrency.given()}
                if "max" in most:
                    most.setdefault("initial", min(ConcurrencyLimit.initial, most["max"]))
                policies.append(
                    ConcurrencyLimit(**most) if preset is None else preset.concurrency_limit(**most)
                )
        if options.circuit.enabled:
            with at("targets", name, "circuit", given=options.circuit):
                when: dict[str, Any] = options.circuit.given()
                if self._store is not None and self._shares("circuits"):
                    when |= {"store": self._store, "name": f"circuit.{name}"}
                policies.append(CircuitBreaker(**when) if preset is None else preset.circuit_breaker(**when))
        if options.timeouts is not None:
            with at("targets", name, "timeouts", given=options.timeouts):
                clocks: dict[str, Any] = options.timeouts.given()
                policies.append(AttemptTimeout(**clocks))
        return policies

    def _shares(self, what: str) -> bool:
        return self._config.store is not None and what in self._config.store.share

    def _of_model(self, model: str, index: int, options: ModelTarget) -> Target:
        base = self.by_name[options.target]
        given = {
            "model": options.model,
            "weight": options.weight,
            "context_window": options.context_window,
            "price": _price(options.price),
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if not changes:
            return base
        with at("models", model, "targets", index, given=options):
            called = base.name if options.model is None else f"{base.name}/{options.model}"
            for name in (called, f"{called}@{model}", f"{called}@{model}.{index}"):
                known = self._named.get(name)
                if known is None and name != base.name:
                    made = self._parts.keep(
                        f"target {name}",
                        (base, changes),
                        lambda name=name: dataclasses.replace(base, name=name, **changes),  # type: ignore[misc]
                    )
                    self._named[name] = _Named(base, changes, made)
                    return made
                if known is not None and (known.base, known.changes) == (base, changes):
                    return known.target
        raise AssertionError(options)  # the last name is nobody else's


def _credentials(target: str, variables: Sequence[str]) -> list[Credential]:
    """Give the keys that are in environment variables; `ConfigError` says which of them is none."""
    credentials = [Credential(env=variable) for variable in variables]
    with at("targets", target, "api_key_env"):
        for credential in credentials:
            try:
                credential.secret()
            except ConfigurationError as error:
                why = str(error).removeprefix(f"credential {credential.name!r}: ")
                raise ConfigurationError(why) from error
    return credentials


def _price(options: PriceOptions | None) -> Price | None:
    return None if options is None else Price(**options.model_dump())
