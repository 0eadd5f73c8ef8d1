"""The total deadline of a call."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import label, seconds
from resilient_llm.errors import DeadlineExceededError
from resilient_llm.ordering import Placement
from resilient_llm.policies._shared_timer import SharedTimer

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import anyio

    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply

__all__ = ["Deadline", "exceeded", "read_seconds"]

_NUMBER = re.compile(rb"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_LONGEST = 64  # bytes of a number that is read


@dataclass(frozen=True, kw_only=False, eq=False)
class Deadline:
    """End a call `total` seconds after it began: queues, attempts, backoff and stream included.

    A call can also inherit an earlier deadline: from the request it is made for, or at the ASGI door
    from the caller's `header` (seconds), which can only shorten it. Raises `DeadlineExceededError`.
    """

    total: float
    header: str | None = "x-request-timeout"
    placement: ClassVar[Placement] = Placement.DEADLINE
    _timer: SharedTimer | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        seconds(total=self.total)
        if self.header is not None:
            label(header=self.header)

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Await the rest of the pipeline, until the deadline."""
        total = self.total
        if call.inbound and self.header is not None:
            total = min(total, _asked_for(call, self.header))
        call.deadline = min(call.deadline, call.started + total)
        # A scope acts at the first checkpoint, which may come after all is done.
        if call.deadline <= call.loop.time():
            raise exceeded(call)
        timer = self._timer
        if timer is None or timer.loop is not call.loop:
            timer = SharedTimer(call.loop)
            object.__setattr__(self, "_timer", timer)
        if call.scope is not None:
            return _in_lent_scope(call.scope, timer, call, call_next)
        return _in_own_scope(timer, call, call_next)


async def _in_own_scope(timer: SharedTimer, call: Call, call_next: CallNext) -> Reply:
    with call.loop.scope() as scope:
        timer.watch(scope, call.deadline)
        if call.inbound:
            # There the pipeline returns only when the app does; what runs after the reply has no deadline.
            call.on_finish(lambda _outcome: timer.disarm(scope))
        try:
            return await call_next(call)
        finally:
            timer.leave(scope)
    raise exceeded(call)


async def _in_lent_scope(
    scope: anyio.CancelScope, timer: SharedTimer, call: Call, call_next: CallNext
) -> Reply:
    timer.watch(scope, call.deadline)
    try:
        return await call_next(call)  # should it be cancelled, whoever lent the scope finds out by whom
    finally:
        timer.disarm(scope)


def exceeded(call: Call) -> DeadlineExceededError:
    """Make the error of a call that was not done by its deadline."""
    after = max(0.0, call.deadline - call.started)  # one that is inherited may have passed before
    return DeadlineExceededError(f"the call was not done by its deadline, {after:g} s after it began")


def _asked_for(call: Call, header: str) -> float:
    value = call.request.header(header.lower().encode("latin-1"))
    asked = None if value is None else read_seconds(value)
    return math.inf if asked is None else asked


def read_seconds(value: bytes) -> float | None:
    """Read the seconds in a header as any language writes a number, `.3` and `3e-1` too; `None` for anything else."""
    value = value.strip()
    if len(value) > _LONGEST or _NUMBER.fullmatch(value) is None:
        return None
    return float(value)
