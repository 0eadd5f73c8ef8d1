"""Let running requests end before the app closes what they use.

Hooks the lifespan messages on their way to the app and swallows none. It stops nothing by force: what is
still running when the time is up is the server's to cancel.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import anyio
from starlette.types import Message, Receive

from resilient_llm.errors import RejectedError

__all__ = ["Drain", "DrainingError"]

logger = logging.getLogger("resilient_llm")


class DrainingError(RejectedError):
    """The app is shutting down and takes no new requests; another instance may."""

    reason = "draining"


class Drain:
    """Count the requests that run, and at shutdown wait for them up to `timeout` seconds."""

    __slots__ = ("_idle", "_running", "_shutting_down", "_timeout")

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running = 0
        self._shutting_down = False
        self._idle: anyio.Event | None = None

    def check(self) -> None:
        """Raise `DrainingError` once the app is shutting down."""
        if self._shutting_down:
            raise DrainingError("the app is shutting down", retry_after=1, name="drain")

    def reopen(self) -> None:
        """Take requests again: the lifespan is over, and whoever asks now runs the app without one."""
        self._shutting_down = False

    @contextmanager
    def running(self) -> Generator[None]:
        """Count a request while it runs."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running and self._idle is not None:
                self._idle.set()

    def watch(self, receive: Receive) -> Receive:
        """Wrap a lifespan's `receive`: the app hears of the shutdown once its requests are done."""

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._shutting_down = False
            elif message["type"] == "lifespan.shutdown":
                await self._drain()
            return message

        return watched

    async def _drain(self) -> None:
        self._shutting_down = True
        if not self._running:
            return
        self._idle = anyio.Event()
        with anyio.move_on_after(self._timeout):
            await self._idle.wait()
        self._idle = None
        if self._running:
            logger.warning(
                "%d requests still run %g s after the shutdown began", self._running, self._timeout
            )
