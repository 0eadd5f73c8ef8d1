"""One timer for all calls that may take equally long: nearly all of them are done long before their time.

On asyncio a timer for each call costs as much as another policy, only to be called off again. What a call is, and
what becomes of one whose time is up, must not enter here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anyio

    from resilient_llm._loop import EventLoop

__all__ = ["SharedTimer"]


class SharedTimer:
    """Cancel scopes at their deadlines, with one timer of their event loop as long as these come in order.

    Set for the oldest deadline there is, and when that has come for the oldest there is by then: how many calls are
    made meanwhile does not matter. `anyio.current_effective_deadline()` does not tell of these deadlines.
    """

    __slots__ = ("_deadlines", "_latest", "_ticking", "loop")

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        # Not a plain dict, whose first entry is hard to find once those before it are gone.
        self._deadlines: OrderedDict[anyio.CancelScope, float] = OrderedDict()
        self._latest = -math.inf
        self._ticking = False

    def watch(self, scope: anyio.CancelScope, deadline: float) -> None:
        """Cancel a scope that has been entered at its deadline, unless it is left to itself before."""
        if deadline < self._latest or not (self._ticking or self._tick(deadline)):
            scope.deadline = deadline  # out of turn, or on trio: it sees to that itself
            return
        self._latest = deadline
        self._deadlines[scope] = deadline

    def leave(self, scope: anyio.CancelScope) -> None:
        """Leave a scope to itself that is over."""
        self._deadlines.pop(scope, None)

    def disarm(self, scope: anyio.CancelScope) -> None:
        """Let a scope go on without a deadline."""
        if self._deadlines.pop(scope, None) is None:
            scope.deadline = math.inf

    def _tick(self, until: float) -> bool:
        self._ticking = self.loop.call_at(until, self._ring)
        return self._ticking

    def _ring(self) -> None:
        self._ticking = False
        now = self.loop.time()
        while self._deadlines:
            scope, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                self._tick(deadline)
                return
            del self._deadlines[scope]
            scope.cancel()
