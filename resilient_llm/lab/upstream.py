"""One synthetic upstream as a value: how fast it is, what it can take, how it fails, what it costs.

What it is at a given moment of a simulation is in `serving`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from resilient_llm._options import at_least, instance_of, is_number, label, number, offers, one_of
from resilient_llm.errors import ConfigurationError
from resilient_llm.lab.capacity import Capacity
from resilient_llm.lab.conditions import KINDS, FailureKind, Outage, Phase
from resilient_llm.lab.distributions import Amount, amount, distribution
from resilient_llm.testing import RateLimits

__all__ = ["Key", "Upstream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key, with limits of its own; once it has spent `max_usd` it is out of quota."""

    rate_limits: RateLimits | None = None
    max_usd: float = math.inf

    def __post_init__(self) -> None:
        instance_of(RateLimits, none=True, rate_limits=self.rate_limits)
        _check_usd(self.max_usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Describe one deployment of a model. Times are in seconds, prices in US dollars per million tokens.

    - `first_token`: until the first token of a reply; `per_token`: for each further one, drawn once a reply. The head
      of a streamed reply comes with its first token, a reply that is not streamed when it is whole.
    - `total`: until a reply is whole, in place of `per_token`; `first_token` is at most that.
    - `output_tokens`: the length of replies, cut at the request's own maximum.
    - `max_events`: into how many events a streamed reply is divided at most; the first is one token, the others come
      evenly. Reading thousands of events one by one is most of the work of a simulation.
    - `failures`: the share of requests that fails in each way, by chance, one independent of the other. They are
      answered after `failure_latency`.
    - `outages`, `phases`: when it is down, slow, or smaller.
    - `capacity`: what it can serve at a time (`Sharing`, `Slots`); None: anything.
    - `rate_limits`: what it lets in per minute, as `testing.RateLimits` describes.
    - `keys`: the API keys it accepts, each with its own limits; None: any.
    - `max_usd`: what may be spent on it in all; then it is out of quota.
    - `input_price`, `output_price`: whole replies are billed, and broken or abandoned ones for as much as was made of
      them. Errors are free.
    - `context_window`: tokens of prompt and reply; more are refused.

    Raises `ConfigurationError` for values that cannot be.
    """

    first_token: Amount = 0.5
    per_token: Amount = 0.0
    total: Amount | None = None
    output_tokens: Amount = 100
    max_events: int = 4
    failures: Mapping[FailureKind, float] = field(default_factory=dict, hash=False)
    failure_latency: Amount = 0.05
    outages: Sequence[Outage] = ()
    phases: Sequence[Phase] = ()
    capacity: Capacity | None = None
    rate_limits: RateLimits | None = None
    keys: Mapping[str, Key] | None = field(default=None, hash=False)
    max_usd: float = math.inf
    input_price: float = 0.0
    output_price: float = 0.0
    context_window: int | None = None

    def __post_init__(self) -> None:
        amount(
            first_token=self.first_token,
            per_token=self.per_token,
            output_tokens=self.output_tokens,
            failure_latency=self.failure_latency,
        )
        amount(none=True, total=self.total)
        for name in ("first_token", "per_token", "output_tokens", "failure_latency", "total"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, distribution(value))
        at_least(1, max_events=self.max_events)
        for name in ("input_price", "output_price"):
            if not is_number(getattr(self, name)) or not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}: allowed are US dollars per million tokens, from 0"
                )
        if self.context_window is not None:
            at_least(1, context_window=self.context_window)
        _check_usd(self.max_usd)
        self._check_failures()
        self._check_limits()

    def _check_failures(self) -> None:
        instance_of(Mapping, failures=self.failures)
        for kind, ratio in self.failures.items():
            one_of(KINDS, failures=kind)
            number(0, 1, inside=False, below=False, none=False, **{f"failures[{kind!r}]": ratio})
        if sum(self.failures.values()) > 1 + 1e-9:
            raise ConfigurationError(
                f"failures={dict(self.failures)!r}: allowed are shares that add up to at most 1"
            )
        object.__setattr__(self, "failures", MappingProxyType(dict(self.failures)))

    def _check_limits(self) -> None:
        for name, kind in (("outages", Outage), ("phases", Phase)):
            value = getattr(self, name)
            if (
                isinstance(value, str | bytes)
                or not isinstance(value, Sequence)
                or not all(isinstance(one, kind) for one in value)
            ):
                raise ConfigurationError(f"{name}={value!r}: allowed are lists of {kind.__name__}")
        offers(("admit", "latency_factor"), "capacities", none=True, capacity=self.capacity)
        instance_of(RateLimits, none=True, rate_limits=self.rate_limits)
        instance_of(Mapping, none=True, keys=self.keys)
        for name, key in (self.keys or {}).items():
            label(keys=name)
            instance_of(Key, none=False, **{f"keys[{name!r}]": key})

    @property
    def failure_ratio(self) -> float:
        """Give the share of requests that fails by chance, in whichever way."""
        return sum(self.failures.values())

    def price(self, input_tokens: int, output_tokens: int) -> float:
        """Give what so many tokens cost, in US dollars."""
        return (input_tokens * self.input_price + output_tokens * self.output_price) / 1e6


def _check_usd(value: float) -> None:
    if not is_number(value) or not value > 0:
        raise ConfigurationError(f"max_usd={value!r}: allowed are US dollars above 0")
