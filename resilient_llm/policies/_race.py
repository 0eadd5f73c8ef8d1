"""Two attempts of one call at a time: when the second begins, which of them wins, and what becomes of the other.

Where they go and what they cost is not known here, nor how late is late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from resilient_llm.call import outcome_of
from resilient_llm.errors import AttemptError, ResilientLLMError
from resilient_llm.outcome import CANCELLED
from resilient_llm.source import abandon
from resilient_llm.telemetry import names

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.policies._pace import Pace

__all__ = ["Race"]

logger = logging.getLogger("resilient_llm")


class Race:
    """Run one attempt and, when it is late, another beside it, until one has a reply.

    The first runs in the task of the call, the other in a task of its own; neither leaves anything open that would
    bind its reply to that task. The one that loses is waited for as long as it takes to be cancelled.
    """

    __slots__ = (
        "_call_next",
        "_delay",
        "_error",
        "_hedge_error",
        "_min_remaining",
        "_pace",
        "_primary",
        "_release",
        "_reply",
        "_running",
        "_second",
        "_tasks",
        "_whole",
        "_winner",
    )

    _tasks: TaskGroup

    def __init__(
        self, primary: Call, call_next: CallNext, pace: Pace, *, delay: float, min_remaining: float
    ) -> None:
        assert primary.parent is not None  # noqa: S101 - only attempts are hedged
        self._pace = pace
        self._whole = primary.parent
        self._primary = primary
        self._call_next = call_next
        self._delay = delay
        self._min_remaining = min_remaining
        self._second: Call | None = None
        self._running = False  # the second attempt
        self._release: Callable[[], None] | None = None
        self._winner: Call | None = None
        self._reply: Reply | None = None
        self._error: Exception | None = None  # of the first attempt
        self._hedge_error: Exception | None = None

    async def run(self) -> Reply:
        """Give the first reply; raises the first attempt's error when there is none."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._run_second)
                await self._run_primary()
            if self._reply is not None:
                if self._winner is not self._primary:
                    await self._primary.end(CANCELLED)
                await _let_go(self._error)
                return self._reply
        except BaseException:
            if self._winner is not None and self._reply is not None:  # nobody is there any more to take it
                self._winner.adopter = None  # why the call ends its door will say
                await _discard(self._winner, self._reply)
            raise
        finally:
            if self._release is not None:
                self._release()
        assert self._error is not None  # noqa: S101 - who neither answers nor fails is cancelled
        if self._hedge_error is not None:
            self._error.add_note(f"a second attempt, of another target, failed too: {self._hedge_error!r}")
        raise self._error

    async def _run_primary(self) -> None:
        try:
            reply = await self._call_next(self._primary)
        except Exception as error:  # noqa: BLE001 - raised again, outside the task group
            self._error = error
            if not self._running or not _fails_over(error):
                self._tasks.cancel_scope.cancel()
            # What it held is free at once, although somebody still waits for the second attempt.
            await self._primary.end(outcome_of(error, self._primary))
        else:
            if self._win(self._primary, reply):
                self._pace.heard(self._primary)
            else:
                await _discard(self._primary, reply)

    async def _run_second(self) -> None:
        await self._until_late()
        if self._winner is not None or self._error is not None:
            return
        why = self._why_not()
        if why is not None:
            if why:
                self._whole.telemetry.event(self._whole, names.HEDGE_SUPPRESSED, {names.REASON: why})
            return
        whole = self._whole
        # The call ends when both have: what the loser has cost is the call's cost, too.
        self._release = whole.keep_open()
        whole.hedges += 1
        second = self._second = whole.attempt(reason="hedge")
        self._running = True
        try:
            reply = await second.run(self._call_next)
        except Exception as error:
            if not isinstance(error, ResilientLLMError):
                logger.warning("a hedge failed in an unexpected way", exc_info=error)
            self._hedge_error = error
            await _let_go(error)
        else:
            if not self._win(second, reply):
                await _discard(second, reply)
            elif self._error is None:  # it has taken so long already, and would have taken longer
                self._pace.heard(self._primary)
        finally:
            self._running = False
            if not second.made:
                whole.hedges -= 1

    def _win(self, attempt: Call, reply: Reply) -> bool:
        """Take the first reply that comes, and send whoever else is under way home."""
        if self._winner is not None:
            return False
        self._winner, self._reply = attempt, reply
        other = self._second if attempt is self._primary else self._primary
        if other is not None:
            other.superseded = True
        self._tasks.cancel_scope.cancel()
        return True

    async def _until_late(self) -> None:
        """Sleep until the delay has passed since the first attempt was sent."""
        primary, time = self._primary, self._primary.loop.time
        while True:
            # As long as it waits on this side its delay has not begun: that may never be over before this sleep.
            began = time() if primary.sent is False else primary.started
            if began + self._delay <= time():
                return
            await anyio.sleep_until(began + self._delay)

    def _why_not(self) -> str | None:
        """Say why no second attempt may be made, with an empty string for no reason to; else draw on the budgets."""
        whole, budget = self._whole, self._pace.budget
        if self._primary.first_chunk is not None:
            return ""  # its stream has begun, and is only held back
        if whole.remaining() < self._min_remaining:
            return "deadline"
        if whole.route is not None and not whole.route.elsewhere(whole):
            return "no_target"
        if not budget.remaining:
            return "budget"
        if whole.budget is not None and not whole.budget.withdraw(whole.loop.time()):
            return "retry_budget"
        budget.withdraw()
        return None


def _fails_over(error: Exception) -> bool:
    """Tell whether another target may succeed where this error came from."""
    return isinstance(error, AttemptError) and error.outcome.fails_over


async def _discard(attempt: Call, reply: Reply) -> None:
    """Close a reply that nobody is going to read, and end its attempt."""
    await abandon(reply.stream, None)
    await attempt.end(CANCELLED)


async def _let_go(error: Exception | None) -> None:
    """Close the reply of a failed attempt that nobody is going to read."""
    if isinstance(error, AttemptError) and error.reply is not None:
        await abandon(error.reply.stream, None)
