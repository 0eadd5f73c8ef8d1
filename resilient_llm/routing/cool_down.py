"""Until when a target is left alone that was throttled, or has said when to come back.

Which outcome it learns from, and what a credential's rest changes about it, the deployment says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from resilient_llm.outcome import Verdict

if TYPE_CHECKING:
    from resilient_llm.outcome import Outcome

__all__ = ["LONGEST_HINT", "CoolDown"]

LONGEST_HINT = 900.0
"""Seconds that a target cools down at most, whatever it has said; then one call finds out how it is."""

_LONGEST_SOFT_HINT = 5.0
"""Seconds that a target cools down because its rate limit will be full again later: much is let through before."""

_SPREAD = 0.1
"""Share of the time it cools down over which those who wait for it come back: together they would overrun it."""


class CoolDown:
    """Keep until when one target is not asked; `usual` is for how long, in seconds, when it does not say."""

    __slots__ = ("_spread", "on_trial", "until", "usual")

    def __init__(self, usual: float) -> None:
        self.usual = usual
        self.end()

    def end(self) -> None:
        """Let it be asked again."""
        self.until = -math.inf
        self.on_trial = False
        """Whether it has said to stay away for longer than anybody does: one call at a time finds out how it is."""
        self._spread = 0.0

    def wanted(self, outcome: Outcome) -> float:
        """Give the seconds for which an attempt's end says that no other should follow; 0 for not at all."""
        hint = outcome.retry_after or 0.0
        if outcome.verdict is Verdict.THROTTLED:
            hint = hint or self.usual
        elif outcome.verdict is not Verdict.FAILURE:
            return 0.0
        return min(hint, _LONGEST_SOFT_HINT) if outcome.retry_after_source == "ratelimit-reset" else hint

    def begin(self, now: float, seconds: float, *, on_trial: bool) -> None:
        """Leave it alone for so long; the longest of several times counts."""
        if seconds and now + seconds > self.until:
            self.until, self._spread, self.on_trial = now + seconds, _SPREAD * seconds, on_trial

    def spread(self, now: float) -> float:
        """Give the seconds over which those who wait for its end are to come back; 0 when it is over."""
        return self._spread if now < self.until else 0.0
