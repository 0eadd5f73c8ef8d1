"""The listeners of one process, from the first connection to the last.

Which signal or message ends them is decided elsewhere, and what they answer by the apps behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from resilient_llm.sidecar.app import Sidecar
    from resilient_llm.sidecar.listener import Listener

__all__ = ["Service", "signals"]

logger = logging.getLogger("resilient_llm")


class Service:
    """Serve a sidecar on `main`, and whatever else on `others`, until told to stop."""

    def __init__(self, sidecar: Sidecar, main: Listener, *others: Listener) -> None:
        self._sidecar = sidecar
        self._main = main
        self._others = others
        self._stopping = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to listen. Raises `OSError` for an address that another has."""
        anyio.current_time()  # anyio loads what it has for this event loop now, and not in the first call
        listeners = (self._main, *self._others)
        for listener in listeners:
            listener.listen()
        self._running = [asyncio.create_task(listener.take_connections()) for listener in listeners]
        try:
            for listener in listeners:
                await listener.is_ready.wait()
        except asyncio.CancelledError:  # a signal came first
            for listener in listeners:
                listener.should_exit = True
            await asyncio.gather(*self._running, return_exceptions=True)
            raise

    def drain(self) -> None:
        """Take no new connections, and end when those that there are have been answered, within the limit for it."""
        self._sidecar.draining = True
        self._stopping.set()

    def stop(self) -> None:
        """Drain, or end at once when it drains already."""
        if self._stopping.is_set():
            self._main.force_exit = True
        self.drain()

    async def ended(self) -> None:
        """Wait for the end."""
        try:
            waiting = asyncio.create_task(self._stopping.wait())
            await asyncio.wait([waiting, *self._running], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            logger.info("draining", extra={"fields": {"running": self._sidecar.running}})
            self._main.should_exit = True
            await self._running[0]
            for other in self._others:  # probes and metrics are answered to the last
                other.should_exit = True
            await asyncio.gather(*self._running)
            logger.info("stopped")
        finally:
            for listener in (self._main, *self._others):
                listener.should_exit = True


@contextlib.contextmanager
def signals(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Have the running loop call these when signals come, and for those that were kept waiting."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in handlers:
            loop.remove_signal_handler(number)
