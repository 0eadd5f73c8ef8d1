"""A second attempt beside one that is late: which calls may have one, and when.

How the two are run is the race's affair and where they go the router's; what becomes of a call whose attempts have
all failed `Retry` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import at_least, label, number, seconds
from resilient_llm.core.hedge_budget import HedgeBudget
from resilient_llm.core.latency_window import LatencyWindow
from resilient_llm.errors import ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.policies._keyed import Key, Keyed, key_function
from resilient_llm.policies._pace import Pace
from resilient_llm.policies._race import Race
from resilient_llm.policies.deadline import Deadline

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply

__all__ = ["Hedge"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Hedge:
    """Make a second attempt, of another target, when the first is late; the first reply wins.

    Late is what took longer than a share `percentile` of recent calls of the same `key` and kind until the first
    content of a stream or the whole of any other reply, but at least `at_least` seconds and at most `max_medians` times
    their median; nothing is hedged before there are `min_samples` of these in `window` seconds. With `delay` it is that
    many seconds instead. Waits on this side, for a limit say, do not count.

    Hedges are at most `budget_ratio` of the calls, of which up to `max_burst` are saved for later, and draw on the
    retry budget too; a call has at most `max_hedges`. What must not be done twice, or cannot be sent twice, has none,
    and neither has a call with less than `min_remaining` seconds left. The attempt that loses is cancelled.

    Raises the first attempt's error when both fail, with a note of the other's. Sources: Dean & Barroso, "The Tail
    at Scale" (CACM 2013); Finagle's `BackupRequestFilter`; gRPC's A6.
    """

    percentile: float = 0.95
    delay: float | None = None
    at_least: float = 0.1
    max_medians: float = 3.0
    """What has taken as long as a few usual replies is late, whatever the percentile: another would have answered."""
    min_samples: int = 20
    window: float = 300.0
    key: Key = "model"
    max_hedges: int = 1
    min_remaining: float = 0.1
    budget_ratio: float = 0.05
    max_burst: int = 10
    max_keys: int = 1024
    name: str = "hedge"
    placement: ClassVar[Placement] = Placement.HEDGE
    _paces: Keyed[Pace] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        number(0, 1, inside=True, percentile=self.percentile)
        if self.delay is not None:
            seconds(delay=self.delay)
        seconds(at_least=self.at_least, min_remaining=self.min_remaining, zero=True)
        seconds(window=self.window)
        number(1, math.inf, max_medians=self.max_medians)
        at_least(1, min_samples=self.min_samples, max_hedges=self.max_hedges, max_burst=self.max_burst)
        number(0, 1, budget_ratio=self.budget_ratio)
        label(name=self.name)
        paces = Keyed(self.name, _kind(self.key), self._pace, idle=Pace.idle, max_keys=self.max_keys)
        object.__setattr__(self, "_paces", paces)

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` when no hedge could ever be made."""
        if not any(getattr(policy, "placement", None) is Placement.ROUTER for policy in policies):
            msg = f"{self.name} needs a Router after it: a second attempt goes to another target, never the same"
            raise ConfigurationError(msg)
        option, least = ("at_least", self.at_least) if self.delay is None else ("delay", self.delay)
        for policy in policies:
            if isinstance(policy, Deadline) and least + self.min_remaining >= policy.total:
                msg = (
                    f"no hedge fits: of the deadline of {policy.total:g} s there have to be "
                    f"{self.min_remaining:g} s left when it is made, which is after {option}={least:g} s"
                )
                raise ConfigurationError(msg)

    def _pace(self, _key: Hashable) -> Pace:
        return Pace(
            LatencyWindow(self.window, min_samples=self.min_samples),
            HedgeBudget(ratio=self.budget_ratio, burst=self.max_burst),
        )

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Carry out an attempt, with another beside it when it is late."""
        whole = call.parent
        if whole is None or not whole.profile.repeat_safe or not whole.request.replayable:
            return await call_next(call)
        pace, now = self._paces.of(whole), call.loop.time()
        if call.reason == "initial":
            pace.budget.deposit()
        delay = self._delay(pace.latencies, now)
        if delay is None or whole.hedges >= self.max_hedges or delay + self.min_remaining > whole.remaining():
            reply = await call_next(call)
            pace.heard(call)
            return reply
        race = Race(call, call_next, pace, delay=delay, min_remaining=self.min_remaining)
        return await race.run()

    def _delay(self, latencies: LatencyWindow, now: float) -> float | None:
        """Give the seconds after which a reply is late; `None` while too little is known."""
        if self.delay is not None:
            return self.delay
        late, usual = latencies.quantile(now, self.percentile), latencies.quantile(now, 0.5)
        if late is None or usual is None:
            return None
        return max(self.at_least, min(late, self.max_medians * usual))


def _kind(key: Key) -> Callable[[Call], Hashable]:
    """Make the function that says which calls are alike: of one key, for one operation, streamed or not."""
    of = _model if key == "model" else key_function(key)

    def kind(call: Call) -> Hashable:
        profile = call.profile
        return of(call), profile.operation, profile.stream

    return kind


def _model(call: Call) -> Hashable:
    return call.logical_model or call.profile.model
