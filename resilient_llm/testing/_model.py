"""How a fake model behaves when nothing is wrong: what it says, how fast, and how much at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ._checks import is_count, is_number
from ._fault import Fault
from ._rate_limits import RateLimits
from ._request_log import ProviderRequest

DEFAULT_REPLY = "The quick brown fox jumps over the lazy dog."


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The seconds a model takes until the response's head, then the first token, then each further one.

    With a `spread` each request's times are multiplied by one draw from a lognormal distribution of
    median 1 and this sigma, from the provider's random generator. Raises ValueError for negative
    values.
    """

    headers: float = 0.0
    first_token: float = 0.0
    per_token: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("headers", "first_token", "per_token", "spread"):
            if not (is_number(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")

    def draw(self, rng: random.Random) -> Latency:
        """Return the latency of one request, without spread."""
        if not self.spread:
            return self
        factor = rng.lognormvariate(0, self.spread)
        return Latency(
            headers=self.headers * factor,
            first_token=self.first_token * factor,
            per_token=self.per_token * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """Describe a model of the fake provider.

    - `reply`: the text it answers, or a function of the request that returns it. A token is a word.
    - `latency`: its speed.
    - `rate_limits`: what it lets in per minute.
    - `max_concurrent`: requests it serves at a time; more are answered with `overload` (a 503
      unless given).
    - `knee`: requests it serves at full speed; beyond, all its times grow in proportion (processor
      sharing), so more concurrency brings no more throughput.

    Raises ValueError for values out of range.
    """

    reply: str | Callable[[ProviderRequest], str] = DEFAULT_REPLY
    latency: Latency = field(default_factory=Latency)
    rate_limits: RateLimits | None = None
    max_concurrent: int | None = None
    overload: Fault = field(default_factory=lambda: Fault(status=503, message="The engine is overloaded"))
    knee: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "knee"):
            value = getattr(self, name)
            if value is not None and not (is_count(value) and value >= 1):
                raise ValueError(f"{name} must be >= 1, or None, got {value!r}")
        if not (isinstance(self.overload, Fault) and self.overload.is_answer):
            raise ValueError("overload must be a Fault with a status or a body")
