"""How long to wait before a retry: exponential backoff with jitter, and the server's hint as a floor.

Arithmetic on numbers handed in. Whether there is a retry at all, and the sleeping, are not decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

from resilient_llm._options import is_number, one_of, seconds
from resilient_llm.errors import ConfigurationError

__all__ = ["Backoff", "floor_with_jitter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Grow the wait from `initial` by `multiplier` at each retry up to `maximum`, in seconds.

    With `jitter="full"` a wait is drawn evenly between 0 and that, so that callers who failed together do not
    come back together; `"none"` waits exactly that long. The cap comes before the jitter: the other way round
    most late waits would be the cap itself. The defaults are those of the OpenAI and Anthropic SDKs.

    Raises `ConfigurationError` for an option outside its range.

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("Full Jitter").
    """

    initial: float = 0.5
    multiplier: float = 2.0
    maximum: float = 8.0
    jitter: Literal["full", "none"] = "full"

    def __post_init__(self) -> None:
        """Refuse options that cannot work."""
        seconds(initial=self.initial)
        if not is_number(self.multiplier) or not 1 <= self.multiplier < math.inf:
            raise ConfigurationError(f"multiplier={self.multiplier!r}: allowed are finite numbers from 1")
        seconds(maximum=self.maximum)
        if self.maximum < self.initial:
            raise ConfigurationError(
                f"maximum={self.maximum!r}: allowed are finite seconds from initial={self.initial!r}"
            )
        one_of(("full", "none"), jitter=self.jitter)

    def delay(self, retry: int, random: Random) -> float:
        """Give the wait before the retry of this number, the first retry being 1, in seconds.

        Raises `ValueError` for a number below 1.
        """
        if retry < 1:
            raise ValueError(f"retry={retry!r}: allowed are numbers from 1")
        try:
            ceiling = min(self.maximum, self.initial * self.multiplier ** (retry - 1))
        except OverflowError:
            ceiling = self.maximum
        return ceiling if self.jitter == "none" else random.uniform(0.0, ceiling)


def floor_with_jitter(hint: float, random: Random, spread: float = 0.1) -> float:
    """Give a wait of at least `hint` seconds and at most `hint * (1 + spread)`.

    Everyone who was throttled together was told the same moment; the jitter is upwards only, because earlier
    than told is never right. A `hint` of 0 gives 0, which is no minimum: use `Backoff.delay` then.

    Raises `ValueError` for a negative hint or spread.

    Source: Envoy's `rate_limited_retry_back_off`, which draws from `hint` to `1.5 * hint`.
    """
    if not hint >= 0:
        raise ValueError(f"hint={hint!r}: allowed are seconds from 0")
    if not 0 <= spread < math.inf:
        raise ValueError(f"spread={spread!r}: allowed are finite ratios from 0")
    return hint * random.uniform(1.0, 1.0 + spread)
