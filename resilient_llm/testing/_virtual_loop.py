"""Virtual time: an asyncio event loop whose clock jumps, and a runner for either backend.

Hours of backoff pass in milliseconds, and every run sees the same times. Only time is virtual here:
real sockets and real threads still work, and while any are in use the clock keeps to the pace of
the wall.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from types import FrameType
from typing import Any, Literal, TypeVar, TypeVarTuple, Unpack

import anyio

from ._checks import is_number

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Ready = list[tuple[selectors.SelectorKey, int]]


class VirtualClockEventLoop(asyncio.SelectorEventLoop):
    """Run asyncio in virtual time, from 0.0 on.

    When nothing is ready, `time()` jumps to the next timer instead of waiting for it. While a
    worker thread is at work or a socket is open the loop waits for them in real time, at most until
    the next timer is due, so the clock never runs ahead of what it cannot see; work that ends
    before that costs no virtual time.

    A loop in which nothing can happen any more (no timer, no socket, no thread) raises a
    RuntimeError that names the pending tasks, where another loop would hang. If threads are alive
    that might still wake it, it is given `patience` real seconds first; off the main thread it
    waits for ever, since whoever drives it may be slow.

    Use it as a `loop_factory` of `asyncio.Runner` or anyio: `backend_options={"loop_factory":
    VirtualClockEventLoop}`.
    """

    def __init__(self, *, patience: float = 5.0) -> None:
        self._patience = patience
        self._working = 0  # executor calls in flight; touched on the loop's thread only
        self._watched = _JumpingSelector(self._wait)
        super().__init__(self._watched)
        self._set_time(0.0)
        if not (is_number(patience) and patience >= 0):
            self.close()
            raise ValueError(f"patience must be >= 0 seconds, got {patience!r}")

    def time(self) -> float:
        """Return the virtual time in seconds since the loop was made."""
        return self._now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` in a thread or process, waited for in real time."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._working += 1
        future.add_done_callback(self._work_done)
        return future

    async def shutdown_default_executor(self, *args: float | None) -> None:
        """Join the executor's threads, waited for in real time."""
        with self._at_work():
            await super().shutdown_default_executor(*args)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def _work_done(self, _: asyncio.Future[Any]) -> None:
        self._working -= 1

    def _wait(self, timeout: float | None, select: Callable[[float | None], Ready]) -> Ready:
        """Answer a `select` that found nothing: wait in real time, jump to the next timer, or give up."""
        due = self._next_timer()
        if due == math.inf:
            timeout = None
        if self._has_foreign_work():
            ready = select(timeout)
        elif timeout is None:
            ready = select(self._bound_of_silence())
            if not ready:
                raise RuntimeError(self._deadlock())
        else:
            ready = []
        if not ready and timeout is not None:
            # The sum may miss the timer by a rounding error, and a task would then wake before its time.
            self._set_time(due if due - self._now <= timeout else self._now + timeout)
        return ready

    def _set_time(self, now: float) -> None:
        self._now = now
        # asyncio runs timers that are due before now plus this: none early, and even a large now has some.
        self._clock_resolution = math.ulp(now)

    def _next_timer(self) -> float:
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled")  # noqa: B009 - typeshed does not know it
        return timers[0].when() if timers else math.inf

    def _has_foreign_work(self) -> bool:
        # One of the watched descriptors is the loop's own self-pipe.
        return (
            self._working > 0
            or len(self._watched.get_map()) > 1
            or any(map(self._is_busy, threading.enumerate()))
        )

    def _is_busy(self, thread: threading.Thread) -> bool:
        # anyio's worker threads do not come from run_in_executor. They alone have `idle_workers`.
        idle_workers = getattr(thread, "idle_workers", None)
        if idle_workers is None or getattr(thread, "loop", None) is not self:
            return False
        return thread not in idle_workers and not getattr(thread, "stopping", False)

    def _bound_of_silence(self) -> float | None:
        """Return how many real seconds to wait before silence counts as a deadlock; None is for ever."""
        this = threading.current_thread()
        if this is not threading.main_thread():
            return None
        others = (thread for thread in threading.enumerate() if thread is not this)
        return 0.0 if all(hasattr(thread, "idle_workers") for thread in others) else self._patience

    def _deadlock(self) -> str:
        tasks = "".join(f"\n  {task.get_name()}{_stack(task)}" for task in asyncio.all_tasks(self))
        return f"deadlock at {self._now:g} s: no timer, thread or socket can wake these tasks{tasks}"


def _stack(task: asyncio.Task[Any]) -> str:
    """Say where a suspended task stands: one line a function, the one that waits last."""
    lines = []
    waiting: object = task.get_coro()
    while waiting is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if hasattr(waiting, f"{kind}_frame")), None)
        if kind is None:
            break
        frame: FrameType | None = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            code = frame.f_code
            lines.append(f"\n    in {code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return "".join(lines)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that asks `wait` what to do instead of blocking."""

    def __init__(self, wait: Callable[[float | None, Callable[[float | None], Ready]], Ready]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> Ready:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        return self._wait(timeout, super().select)


def virtual_backend(backend: Literal["asyncio", "trio"]) -> tuple[str, dict[str, Any]]:
    """Return an event loop in virtual time, as anyio's `anyio_backend` fixture and `anyio.run` take it.

    asyncio is `VirtualClockEventLoop`; trio has its own `MockClock(autojump_threshold=0)`, which
    waits for no thread or socket. The clock starts at 0.0 on both.
    """
    if backend == "asyncio":
        return "asyncio", {"loop_factory": VirtualClockEventLoop}
    if backend == "trio":
        from trio.testing import MockClock  # noqa: PLC0415 - optional

        return "trio", {"clock": MockClock(autojump_threshold=0)}
    raise ValueError(f"backend must be 'asyncio' or 'trio', got {backend!r}")


def run_virtual(
    function: Callable[[Unpack[Ts]], Awaitable[T]],
    *args: *Ts,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> T:
    """Run an async function in virtual time, on a new event loop, and return its result."""
    name, options = virtual_backend(backend)

    async def main() -> T:
        return await function(*args)

    return anyio.run(main, backend=name, backend_options=options)
