"""One limit as it is configured: of whom, how much of what, and how much of it at once.

Nothing is counted in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from resilient_llm._options import flag, is_number, label, seconds
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies._keyed import Key, key_function

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["Dimension", "Limit"]

Dimension: TypeAlias = Literal["requests", "tokens", "burst"]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Limit requests and tokens of each `key`: a tenant, a model, a target; with `None` the whole account.

    `requests_per_minute` and `tokens_per_minute` are buckets that hold `window` seconds' worth and refill evenly;
    `burst` is one of requests per second. `learn` says whether replies that report what remains of a limit speak of
    this one. By default they do for a key of `target` and `model`, and for the account where no limit has such a key.
    `scope` names it in errors and metrics.

    Raises `ConfigurationError` for options that cannot work.
    """

    key: Key | None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst: float | None = None
    window: float = 60.0
    learn: bool | None = None
    scope: str | None = None

    def __post_init__(self) -> None:
        seconds(window=self.window)
        rates = {
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
            "burst": self.burst,
        }
        for name, rate in rates.items():
            if rate is not None and not (is_number(rate) and 0 < rate < math.inf):
                raise ConfigurationError(
                    f"{name}={rate!r}: allowed are finite numbers above 0, or None for no limit"
                )
        if all(rate is None for rate in rates.values()):
            raise ConfigurationError(f"a limit limits nothing: give at least one of {', '.join(rates)}")
        if self.learn is not None:
            flag(learn=self.learn)
        if self.scope is not None:
            label(scope=self.scope)
        if self.key is not None:
            key_function(self.key)  # validates

    @property
    def name(self) -> str:
        """Give what it is a limit of, for people: tenant, model, account ..."""
        if self.scope is not None:
            return self.scope
        if self.key is None:
            return "account"
        if callable(self.key):
            name = getattr(self.key, "__name__", "<")
            return "custom" if name.startswith("<") else name
        return self.key if isinstance(self.key, str) else "+".join(self.key)

    @property
    def own(self) -> bool:
        """Tell whether only calls of one tenant draw on one of its quotas."""
        return self.key == "tenant" or (isinstance(self.key, tuple) and "tenant" in self.key)

    @property
    def mirrors(self) -> bool:
        """Tell whether its key is one that providers keep limits by."""
        return self.key in ("target", "model") or (isinstance(self.key, tuple) and not self.own)

    def shared_key(self, *, in_store: bool = False) -> Callable[[Call], Hashable] | None:
        """Give the function of a call whose value calls that draw on one quota have in common; `None` if all have."""
        if self.key is None or self.key == "tenant":
            return None
        if not isinstance(self.key, tuple):
            return key_function(self.key, in_store=in_store)
        rest = tuple(name for name in self.key if name != "tenant")
        return key_function(rest) if rest else None

    def buckets(self) -> dict[Dimension, tuple[float, float]]:
        """Give capacity and refill per second of each bucket, by what it counts."""
        buckets: dict[Dimension, tuple[float, float]] = {}
        if self.requests_per_minute is not None:
            # At least one, or no request would ever pass.
            buckets["requests"] = (
                max(1.0, self.requests_per_minute * self.window / 60),
                self.requests_per_minute / 60,
            )
        if self.tokens_per_minute is not None:
            buckets["tokens"] = self.tokens_per_minute * self.window / 60, self.tokens_per_minute / 60
        if self.burst is not None:
            buckets["burst"] = max(1.0, self.burst), self.burst
        return buckets
