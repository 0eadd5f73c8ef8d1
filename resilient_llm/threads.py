"""Threads for synchronous functions: how many there are, and what a call holds while its function is on one.

A thread cannot be stopped: whoever leaves it leaves its permits with it. What a function means, and which call it is,
must not enter here.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, TypeVar, cast

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["Threads", "sheltered"]

_T = TypeVar("_T")


class Threads:
    """Run synchronous functions of attempts on at most `max_threads` threads.

    An attempt from inside of one that is on a thread waits for no thread but its own: where all are taken it runs on
    one more, one at a time for each that is blocked by it. Otherwise functions that call each other would wait for
    the threads that they hold themselves.

    From inside of one on a thread of another pipeline it waits like any other, except where all threads here are of
    functions that wait for threads themselves, and so perhaps for each other. Whoever would be the last to wait in
    such a ring finds them so, and runs on one more instead: no ring is ever closed.
    """

    __slots__ = ("_limiter",)

    def __init__(self, max_threads: int) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)

    async def run(self, attempt: Call, function: Callable[[], object]) -> object:
        """Run a function on a thread as soon as there is one; a caller that is cancelled leaves at once."""
        limiter = await self._take(attempt)
        place = _places[attempt] = _Place(self)
        job = _ThreadJob(function, attempt, place, limiter)
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
        above = _places_above(attempt)
        if not above:
            await self._limiter.acquire_on_behalf_of(attempt)
            return self._limiter
        try:
            self._limiter.acquire_on_behalf_of_nowait(attempt)
        except anyio.WouldBlock:
            if any(place.threads is self for place in above) or self._all_wait():
                extra = above[0].extra  # which only its own children wait for, and none of what is above them
                await extra.acquire_on_behalf_of(attempt)
                return extra
            for place in above:
                place.waiting.add(attempt)
            try:
                await self._limiter.acquire_on_behalf_of(attempt)
            finally:
                for place in above:
                    place.waiting.discard(attempt)
        return self._limiter

    def _all_wait(self) -> bool:
        """Tell whether all functions on these threads wait for threads of others."""
        attempts = self._limiter.statistics().borrowers
        if len(attempts) < self._limiter.total_tokens:
            return False  # the next in line is about to begin
        # One that has no place yet is about to begin, too.
        places = [_places.get(cast("Call", attempt)) for attempt in attempts]
        return all(place is not None and place.waiting for place in places)

    def give_back(self, attempt: Call, limiter: anyio.CapacityLimiter) -> None:
        """Give an attempt's thread back."""
        del _places[attempt]
        limiter.release_on_behalf_of(attempt)


class _Place:
    """Where an attempt is on a thread, which calls are made from inside of it, and who of them waits for a thread."""

    __slots__ = ("_extra", "_inside", "threads", "waiting")

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.waiting: set[Call] = set()
        self._extra: anyio.CapacityLimiter | None = None
        self._inside: dict[anyio.CancelScope, anyio.TaskInfo] = {}

    async def shelter(self, made: Awaitable[_T]) -> _T:
        """Await what is made from inside of it, and make sure that a cancellation which has begun reaches it."""
        with anyio.CancelScope() as scope:
            self._inside[scope] = anyio.get_current_task()
            self._finish_cancellation(scope)
            try:
                return await made
            finally:
                del self._inside[scope]
        raise CancelledError  # where nothing around it is cancelled any more

    def leave(self) -> None:
        """Let no cancellation that came with its caller's be lost, now that this one has left."""
        for scope in self._inside:
            self._finish_cancellation(scope)

    def _finish_cancellation(self, scope: anyio.CancelScope) -> None:
        if self._inside[scope].has_pending_cancellation():
            scope.cancel()

    @property
    def extra(self) -> anyio.CapacityLimiter:
        """Give what attempts from inside of it take turns for, to run on one more thread."""
        if self._extra is None:
            self._extra = anyio.CapacityLimiter(1)
        return self._extra


_places: dict[Call, _Place] = {}
"""Of all attempts on threads, of whichever pipeline."""


async def sheltered(call: Call, enclosing: Call, made: Awaitable[_T]) -> _T:
    """Await what a call makes inside of another, and finish its cancellation where that is on a thread that is left.

    What `anyio.from_thread` runs is in the cancel scope of the thread's caller. On asyncio a caller that leaves takes
    that scope's means to cancel along: what it has not reached by then would wait for its cancellation for ever.
    """
    above = _places_from(enclosing, call)
    return await (above[0].shelter(made) if above else made)


def _places_above(attempt: Call) -> list[_Place]:
    return _places_from(attempt.enclosing, attempt)


def _places_from(call: Call | None, attempt: Call) -> list[_Place]:
    """Find those on threads that an attempt was made from inside of, in its event loop, the nearest first."""
    found: list[_Place] = []
    while call is not None:
        place = _places.get(call)
        if place is not None and call.loop is attempt.loop:
            found.append(place)
        call = call.enclosing
    return found


class _ThreadJob:
    """One synchronous function on a thread of ours, and what it holds until it ends.

    A caller that is cancelled leaves at once; a thread cannot be stopped, so its permits stay with it.
    """

    __slots__ = ("_attempt", "_function", "_held", "_limiter", "_place", "_release_call", "_turn")

    def __init__(
        self,
        function: Callable[[], object],
        attempt: Call,
        place: _Place,
        limiter: anyio.CapacityLimiter,
    ) -> None:
        self._function = function
        self._attempt = attempt
        self._place = place
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
        self._place.leave()
        if _take(self._turn):
            self.release()

    def release(self) -> None:
        """Give back the thread and the call's permits, once."""
        if _take(self._held):
            self._place.threads.give_back(self._attempt, self._limiter)
            self._release_call()


def _take(token: list[bool]) -> bool:
    """Take the one token there is; `list.pop` is atomic between threads."""
    try:
        token.pop()
    except IndexError:
        return False
    return True
