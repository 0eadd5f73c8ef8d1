"""Threads for synchronous functions: how many there are, and what a call holds while its function is on one.

A thread cannot be stopped: whoever leaves it leaves its permits with it. What a function means, and which call it is,
must not enter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["Threads"]


class Threads:
    """Run synchronous functions of attempts on at most `max_threads` threads.

    An attempt from inside of one that is on a thread waits for no thread but its own: where all are taken it runs on
    one more, one at a time for each that is blocked by it. Otherwise functions that call each other would wait for
    the threads that they hold themselves.
    """

    __slots__ = ("_limiter", "_on_thread")

    def __init__(self, max_threads: int) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._on_thread: dict[Call, anyio.CapacityLimiter | None] = {}
        """The attempts on a thread, and what those from inside of them take turns for."""

    async def run(self, attempt: Call, function: Callable[[], object]) -> object:
        """Run a function on a thread as soon as there is one; a caller that is cancelled leaves at once."""
        limiter = await self._take(attempt)
        self._on_thread[attempt] = None
        job = _ThreadJob(function, attempt, self, limiter)
        try:
            result = await anyio.to_thread.run_sync(
                job.run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(math.inf)
            )
        except anyio.get_cancelled_exc_class():
            job.leave()
            raise
        except BaseException:
            job.release()
            raise
        job.release()
        return result

    async def _take(self, attempt: Call) -> anyio.CapacityLimiter:
        above = self._above(attempt)
        if above is None:
            await self._limiter.acquire_on_behalf_of(attempt)
            return self._limiter
        try:
            self._limiter.acquire_on_behalf_of_nowait(attempt)
        except anyio.WouldBlock:
            extra = self._on_thread[above]
            if extra is None:
                extra = self._on_thread[above] = anyio.CapacityLimiter(1)
            await extra.acquire_on_behalf_of(attempt)
            return extra
        return self._limiter

    def _above(self, attempt: Call) -> Call | None:
        """Find the nearest attempt on a thread of these that this one was made from inside of."""
        call = attempt.enclosing
        while call is not None and call not in self._on_thread:
            call = call.enclosing
        return call

    def give_back(self, attempt: Call, limiter: anyio.CapacityLimiter) -> None:
        """Give an attempt's thread back."""
        del self._on_thread[attempt]
        limiter.release_on_behalf_of(attempt)


class _ThreadJob:
    """One synchronous function on a thread of ours, and what it holds until it ends.

    A caller that is cancelled leaves at once; a thread cannot be stopped, so its permits stay with it.
    """

    __slots__ = ("_attempt", "_function", "_held", "_limiter", "_release_call", "_threads", "_turn")

    def __init__(
        self,
        function: Callable[[], object],
        attempt: Call,
        threads: Threads,
        limiter: anyio.CapacityLimiter,
    ) -> None:
        self._function = function
        self._attempt = attempt
        self._threads = threads
        self._limiter = limiter
        self._release_call = attempt.keep_open()
        self._turn = [True]  # taken by the thread that begins or by the caller that leaves, whoever is first
        self._held = [True]

    def run(self) -> object:
        """Run the function, in the thread."""
        if not _take(self._turn):
            return None
        try:
            return self._function()
        finally:
            self._attempt.loop.post(self.release)

    def leave(self) -> None:
        """Leave a function that runs to itself; one that has not begun never will."""
        if _take(self._turn):
            self.release()

    def release(self) -> None:
        """Give back the thread and the call's permits, once."""
        if _take(self._held):
            self._threads.give_back(self._attempt, self._limiter)
            self._release_call()


def _take(token: list[bool]) -> bool:
    """Take the one token there is; `list.pop` is atomic between threads."""
    try:
        token.pop()
    except IndexError:
        return False
    return True
