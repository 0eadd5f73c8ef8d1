"""Which event loop is running, and how to hand it work from elsewhere.

State that belongs to one event loop (queues, permits, circuits) checks here that it is still used
from that loop; finalisers and other threads post their work here instead of touching that state.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import anyio

from resilient_llm.errors import EventLoopError

if TYPE_CHECKING:
    import trio.lowlevel

__all__ = ["ROUNDING", "EventLoop", "LoopBound"]

ROUNDING = 1e-6
"""Seconds by which a wait may miss its end: what a time that was kept on a clock may be off by."""


class EventLoop:
    """Stand for one running event loop, asyncio's or trio's."""

    __slots__ = ("__weakref__", "_loop", "scope", "thread", "time")

    time: Callable[[], float]
    """The clock of `anyio.current_time()`; it also works in callbacks that run outside any task."""

    scope: Callable[..., anyio.CancelScope]
    """Makes an `anyio.CancelScope(deadline=...)` without asking each time which library runs, a third of its cost."""

    def __init__(self, loop: asyncio.AbstractEventLoop | trio.lowlevel.TrioToken) -> None:
        self._loop = loop
        self.thread = get_ident()
        """Where the loop ran when it was last asked for; `is_here` notices that it has moved."""
        self.time = loop.time if isinstance(loop, asyncio.AbstractEventLoop) else anyio.current_time
        self.scope = type(anyio.CancelScope())

    @staticmethod
    def running() -> object:
        """Give the running loop's identity (an asyncio loop or a trio token).

        Raises `RuntimeError` when no event loop is running in this thread.
        """
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            trio = sys.modules.get("trio")
            if trio is None:
                raise
            token: object = trio.lowlevel.current_trio_token()
            return token

    @classmethod
    def current(cls) -> EventLoop:
        """Give the one handle there is on the running loop."""
        running = cls.running()
        handle = _handles.get(running)
        if handle is None:
            handle = _handles[running] = cls(running)  # type: ignore[arg-type]
        return handle

    def is_here(self) -> bool:
        """Tell whether the loop runs in this thread, which may be another than before."""
        try:
            here = self.running() is self._loop
        except RuntimeError:
            return False
        if here:
            self.thread = get_ident()
        return here

    def post(self, callback: Callable[[], None]) -> None:
        """Run `callback` soon in the loop, from any thread; at once, and here, when the loop has ended."""
        try:
            if isinstance(self._loop, asyncio.AbstractEventLoop):
                self._loop.call_soon_threadsafe(callback)
            else:
                self._loop.run_sync_soon(callback)
        except RuntimeError:  # closed (asyncio) or finished (trio's RunFinishedError is one)
            self.time, self.thread = _stopped, get_ident()
            callback()  # nobody else is left to meet here

    def tell(self, callback: Callable[[], object]) -> None:
        """Call, from the loop, what wakes somebody who waits in it; nobody does any more in one that has ended."""
        try:
            callback()
        except RuntimeError:
            if not self.has_ended():
                raise

    def call_at(self, when: float, callback: Callable[[], None]) -> bool:
        """Run `callback` in the loop, from where this is called, at a time on its clock.

        `False`, and nothing, on trio, which knows no such timers, and whose cancel scopes need none.
        """
        if not isinstance(self._loop, asyncio.AbstractEventLoop):
            return False
        self._loop.call_at(when, callback)
        return True

    def is_alive(self) -> bool:
        """Tell whether the loop is still running."""
        if isinstance(self._loop, asyncio.AbstractEventLoop):
            return self._loop.is_running() and not self._loop.is_closed()
        return not self.has_ended()

    def has_ended(self) -> bool:
        """Tell whether nothing will ever run in the loop again; one of asyncio's may stand still, and go on later."""
        if isinstance(self._loop, asyncio.AbstractEventLoop):
            return self._loop.is_closed()
        try:
            self._loop.run_sync_soon(_nothing)
        except RuntimeError:
            return True
        return False


_handles: WeakValueDictionary[object, EventLoop] = WeakValueDictionary()
"""By their loops, which they hold: who keeps state of a loop keeps its handle, and when nobody does both may go."""


def _stopped() -> float:
    """Give the time of a clock that has gone with its loop."""
    return 0.0


def _nothing() -> None:
    """Do nothing; a loop that can still be told to is alive."""


class LoopBound:
    """Keep state with the event loop it belongs to.

    The first use binds it. A later loop takes over when the first has ended, and `reset` is called,
    since waiters and clocks of the old one mean nothing there; while the first still runs, or in
    a forked child, use from another loop raises `EventLoopError`.
    """

    __slots__ = ("_name", "_reset", "_running", "loop")

    def __init__(self, name: str, reset: Callable[[], None]) -> None:
        self._name = name
        self._reset = reset
        self.loop: EventLoop | None = None
        """The event loop it belongs to, once it has been used."""
        self._running: object = None

    def bind_alive(self) -> None:
        """Make sure that this state belongs to a loop that runs; `EventLoopError` when there is none."""
        if self.loop is None or not self.loop.is_alive():
            try:
                self.bind()
            except RuntimeError as error:
                msg = f"{self._name} is used outside an event loop, and belongs to none that is running"
                raise EventLoopError(msg) from error

    def run(self, callback: Callable[[float], None]) -> None:
        """Run `callback` with the time, in the loop this state belongs to: at once there, soon from elsewhere.

        Nothing is done where there is none: no state has been used yet.
        """
        loop = self.loop
        if loop is None:
            return
        try:
            at_home = EventLoop.running() is self._running
        except RuntimeError:
            at_home = False
        if at_home:
            callback(loop.time())
        else:
            loop.post(lambda: callback(loop.time()))

    def time(self) -> float:
        """Give the time of the loop this state belongs to."""
        return self.bind().time() if self.loop is None else self.loop.time()

    def bind(self, known: EventLoop | None = None) -> EventLoop:
        """Give the loop this state belongs to; it is the running one, which the caller may know already."""
        loop = self.loop
        if loop is not None:
            if loop is known:
                return loop
            try:
                running: object = asyncio.get_running_loop()
            except RuntimeError:
                running = EventLoop.running()
            if running is self._running:
                return loop
            if loop.is_alive():
                msg = (
                    f"{self._name} is in use by another event loop that is still running "
                    "(or was carried over a fork); make one per event loop, after the fork"
                )
                raise EventLoopError(msg)
            self._reset()
        self._running = EventLoop.running()
        self.loop = loop = EventLoop.current()
        return loop
