"""A reply's body as it comes from the network: read by one task at a time, closed by any, given up when it is late.

What the bytes mean, and who is told of an end, is for the streams that read from here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop
    from resilient_llm.message import ByteStream, Offer

__all__ = ["ReadTimedOutError", "Source", "abandon", "close"]

Taken = TypeVar("Taken")

_CLOSING = 1.0
"""Seconds that closing a body may take; whoever waits for the permits behind it waits no longer."""


_kept: dict[int, tuple[ByteStream, AsyncIterator[bytes]]] = {}
"""Bodies that are being read, by the identity of what iterates over them.

The generators of an HTTP library must not become garbage together with those of an SDK that was left in the middle:
the collector ends all of them, in any order, in tasks of their own that get into each other's way. Kept here, they are
closed from the outside in, by whoever closes the body or once nobody is left who could.
"""


class ReadTimedOutError(Exception):
    """A read from the network took longer than it may; the connection is closed."""


class Source:
    """Read a body, and close it whatever becomes of it."""

    __slots__ = ("_alarm", "_closed", "_ended", "_iterator", "_loop", "_reading", "_stream")

    def __init__(self, stream: ByteStream, loop: EventLoop) -> None:
        self._stream = stream
        self._loop = loop
        self._iterator: AsyncIterator[bytes] | None = None
        native = loop._loop
        self._alarm: _Alarm | _ScopeAlarm = (
            _Alarm(native) if isinstance(native, asyncio.AbstractEventLoop) else _ScopeAlarm(loop.scope)
        )
        self._reading = False
        self._ended = False
        self._closed = False

    async def read(
        self, take: Callable[[bytes], Taken], until: float = math.inf, offer: Offer | None = None
    ) -> Taken | None:
        """Read on until `take` makes something of what comes, and give that; `None` at the end.

        What comes while this waits is shown first to `offer`, where the body can do that, in the midst of the event
        loop's reading; `take` gets what it gives back, and where that is `None` nobody wakes up. `until` is on
        `anyio.current_time()`'s clock. A body that fails is closed. Raises `ReadTimedOutError`, `BusyResourceError`
        when another task is reading, `ClosedResourceError` when one closes it meanwhile (or what the stream makes of
        that), and whatever the stream raises.
        """
        if self._reading:
            raise anyio.BusyResourceError("reading from")
        if self._ended or self._closed:
            return None
        iterator, alarm = self._iterator, self._alarm
        if iterator is None:
            iterator = self._begin()
        following = iterator.__anext__ if offer is None else _offering(iterator, offer)
        self._reading = True
        try:
            alarm.start(until)
            while True:
                taken = take(await following())
                if taken:
                    return taken
        except StopAsyncIteration:
            self._ended = True
            self._let_go()
            alarm.turn_off()
            return None
        except BaseException as error:
            if not await self._is_late(error):
                raise
        finally:
            alarm.stop()
            self._reading = False
        if self._closed:
            raise anyio.ClosedResourceError
        await self.give_up()
        raise ReadTimedOutError

    def last_until(self, until: float) -> None:
        """Let the read that has begun last until then; from an `offer`."""
        self._alarm.last_until(until)

    async def _is_late(self, error: BaseException) -> bool:
        """Tell whether a read failed for being late alone, and give the body up if not."""
        late = False
        try:
            late = self._alarm.stop(error)  # trio's may raise what is left of a group of errors
        finally:
            if not late:
                await self.give_up()
        return late

    def _begin(self) -> AsyncIterator[bytes]:
        self._iterator = iterator = self._stream.__aiter__()
        _kept[id(iterator)] = (self._stream, iterator)
        return iterator

    async def aclose(self) -> None:
        """Close the body, in a second at most, wherever its reader has left it; one who is inside is sent away."""
        if self._closed:
            return
        self._closed = True
        self._alarm.ring()
        with self._loop.scope(shield=True, deadline=self._loop.time() + _CLOSING):
            await close(self._stream, self._iterator)
        self._let_go()

    async def give_up(self) -> None:
        """Close a body that has failed, in a second at most; what that raises is nobody's to hear."""
        if not self._closed:
            self._closed = True
            self._alarm.turn_off()
            await abandon(self._stream, self._iterator)
            self._let_go()

    def _let_go(self) -> None:
        _kept.pop(id(self._iterator), None)

    def __del__(self) -> None:
        iterator = self._iterator
        if iterator is not None and id(iterator) in _kept:
            self._loop.post(partial(_forget, id(iterator)))


def _offering(iterator: AsyncIterator[bytes], offer: Offer) -> Callable[[], Awaitable[bytes]]:
    offering = getattr(iterator, "offering", None)
    return iterator.__anext__ if offering is None else partial(offering, offer)


def _forget(identity: int) -> None:
    _kept.pop(identity, None)


class _Alarm:
    """Send the task away that reads when that takes too long, on asyncio.

    A cancel scope for each read would cost as much as everything else that is done with what was read. So there is one
    timer for all reads of a body, set anew only when it has gone off too early or would go off too late; a read
    only says until when it may last. It ends a read as `asyncio.timeout` does.
    """

    __slots__ = ("_before", "_due", "_loop", "_rings", "_task", "_timer", "_until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._before = 0  # how often the task had been asked to end before
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the timer goes off
        self._rings = False

    def start(self, until: float) -> None:
        """Begin a read that may last until then."""
        self._task = task = asyncio.current_task(self._loop)
        self._before = 0 if task is None else task.cancelling()
        self._until = until
        if until < self._due:
            self._set(until)

    def last_until(self, until: float) -> None:
        """Let the read last until then."""
        self._until = until
        if until < self._due:  # else the timer goes off before that, and finds it
            self._set(until)

    def stop(self, error: BaseException | None = None) -> bool:
        """End a read; tell whether it is this alarm that `error` comes from, and nobody else wants the task to end."""
        task, self._task = self._task, None
        if task is None or not self._rings:
            return False
        self._rings = False
        return task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError)

    def ring(self) -> None:
        """Send whoever reads away."""
        if self._task is not None and not self._rings:
            self._rings = True
            self._task.cancel()
        self.turn_off()

    def turn_off(self) -> None:
        """Let go of the timer, when there is nothing more to read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._due = math.inf

    def _set(self, due: float) -> None:
        self.turn_off()
        self._timer = self._loop.call_at(due, self._go_off)
        self._due = due

    def _go_off(self) -> None:
        self.turn_off()
        if self._task is None:
            return  # the next read sets it again
        if self._loop.time() < self._until:
            self._set(self._until)
        else:
            self.ring()


class _ScopeAlarm:
    """Do the same where timers belong to tasks, on trio: by a scope for what has to be read now.

    None is held while the consumer has the stream.
    """

    __slots__ = ("_make_scope", "_scope")

    def __init__(self, make_scope: Callable[..., anyio.CancelScope]) -> None:
        self._make_scope = make_scope
        self._scope: anyio.CancelScope | None = None

    def start(self, until: float) -> None:
        """Begin a read that may last until then."""
        if until != math.inf:
            self._scope = self._make_scope(deadline=until)
            self._scope.__enter__()

    def last_until(self, until: float) -> None:
        """Let the read last until then."""
        if self._scope is not None:
            self._scope.deadline = until

    def stop(self, error: BaseException | None = None) -> bool:
        """End a read; tell whether it is this alarm that `error` comes from, and nobody else wants the task to end."""
        scope, self._scope = self._scope, None
        if scope is None:
            return False
        if error is None:
            return bool(scope.__exit__(None, None, None))
        return bool(scope.__exit__(type(error), error, error.__traceback__))

    def ring(self) -> None:
        """Send whoever reads away."""
        if self._scope is not None:
            self._scope.cancel()

    def turn_off(self) -> None:
        """Let go of nothing: each read lets go of its own."""


async def close(stream: ByteStream, iterator: AsyncIterator[bytes] | None) -> None:
    """Close a stream and the iterator somebody may have left half way."""
    try:
        if isinstance(iterator, AsyncGenerator):
            try:
                await iterator.aclose()
            except RuntimeError as error:
                # Another task is inside it; closing the stream below makes that one end.
                if "already running" not in str(error):
                    raise
    finally:
        await stream.aclose()


async def abandon(stream: ByteStream, iterator: AsyncIterator[bytes] | None) -> None:
    """Close a stream that has failed, whose own error is the one to be told."""
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CLOSING), suppress(Exception):
        await close(stream, iterator)
