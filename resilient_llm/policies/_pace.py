"""How long replies of one kind of call take to begin, and how many of these calls may be hedged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.core.hedge_budget import HedgeBudget
    from resilient_llm.core.latency_window import LatencyWindow

__all__ = ["Pace"]


class Pace:
    """Keep what `Hedge` knows of one kind of call."""

    __slots__ = ("budget", "latencies")

    def __init__(self, latencies: LatencyWindow, budget: HedgeBudget) -> None:
        self.latencies = latencies
        self.budget = budget

    def idle(self, now: float) -> bool:
        """Tell whether nothing is known, and no hedge has been had in advance."""
        return not self.latencies.samples(now) and self.budget.remaining > 0

    def heard(self, attempt: Call) -> None:
        """Take the time that an attempt took until its reply began, or so far."""
        now, latency = attempt.loop.time(), attempt.first_content
        self.latencies.record(now, now - attempt.started if latency is None else latency)
