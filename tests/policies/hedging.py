"""Two targets to hedge between, and a router that only counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import anyio

from resilient_llm import Call, Outcome, Reply, Target
from resilient_llm.call import CallNext
from resilient_llm.ordering import Placement

__all__ = ["Attempts", "Gate", "InTurn", "knows_what_is_sent"]


async def knows_what_is_sent(call: Call, call_next: CallNext) -> Reply:
    """Say of a call, as doors do, that it is not sent yet; a `Gate` says when an attempt is."""
    call.sent = False
    return await call_next(call)


class Gate:
    """Have attempts wait on this side, each for so many seconds, before they are sent."""

    def __init__(self, *waits: float) -> None:
        self.waits = list(waits)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Wait, and send it."""
        await anyio.sleep(self.waits.pop(0))
        call.mark_sent()
        return await call_next(call)


class InTurn:
    """Send each attempt of a call to the next target; stands where a `Router` stands."""

    placement = Placement.ROUTER

    def __init__(self, *targets: str) -> None:
        self.targets = [Target(name=name, address=name) for name in targets or ("one", "two")]
        self.sent: Counter[str] = Counter()

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Choose by the number of the attempt."""
        target = self.targets[(call.number - 1) % len(self.targets)]
        self.sent[target.name] += 1
        path = call.request.url.partition("://")[2].partition("/")[2]
        call.direct(target, call.request.replace(url=f"http://{target.name}/{path}"))
        return await call_next(call)


class Attempts:
    """Keep every attempt that is made, innermost: what it was of, and how each ended. Holds something meanwhile."""

    def __init__(self) -> None:
        self.made: list[Call] = []
        self.held = 0
        self.log: list[tuple[str, int]] = []

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Take, and give back at the end."""
        self.made.append(call)
        self.held += 1
        self.log.append(("begun", call.number))
        call.on_finish(partial(self._give_back, call.number))
        return await call_next(call)

    def _give_back(self, number: int, _outcome: Outcome) -> None:
        self.held -= 1
        self.log.append(("ended", number))

    @property
    def reasons(self) -> Sequence[tuple[int, str, str]]:
        """Say of each attempt its number, its reason and its target."""
        return [(call.number, call.reason, call.target.name) for call in self.made]

    @property
    def ends(self) -> Sequence[str]:
        """Say how each ended: "success", or the type of the error."""
        return [
            "open" if call.outcome is None else call.outcome.error_type or call.outcome.verdict.value
            for call in self.made
        ]
