"""Close what an app used, once, when its lifespan is over: however that ends, and not while it may be served.

Hooks the lifespan's messages and swallows none. What is closed is whoever has opened it to say.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Lifespan"]

logger = logging.getLogger("resilient_llm")

_LAST = frozenset({"lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"})
_CLOSING = 5.0  # seconds in which connections must be let go


class Lifespan:
    """Run one lifespan of an app, and `close` what is called `what` before the last word of it.

    Where there is none it is closed when the app has ended, which counts only once the server has asked for that, the
    app has begun and fails, or it is cancelled: an app that has no lifespan says so by raising, or by silence, and
    is served all the same.
    """

    __slots__ = ("_asked", "_begun", "_close", "_closed", "_receive", "_send", "_what")

    def __init__(
        self, receive: Receive, send: Send, *, close: Callable[[], Awaitable[None]], what: str
    ) -> None:
        self._receive = receive
        self._send = send
        self._close = close
        self._what = what
        self._begun = False
        self._asked = False
        self._closed = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run it to its end; raises what the app raises."""
        try:
            await app(scope, self._hear, self._say)
        except GeneratorExit:
            raise  # dropped by whoever ran it: nothing can be awaited any more
        except BaseException as error:
            if self._begun or not isinstance(error, Exception):
                await self._over()
            raise
        if self._asked:
            await self._over()

    async def _hear(self) -> Message:
        message = await self._receive()
        if message["type"] == "lifespan.shutdown":
            self._asked = True
        return message

    async def _say(self, message: Message) -> None:
        self._begun = True
        if message["type"] in _LAST:
            await self._over()
        await self._send(message)

    async def _over(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._close_in_time()
        except anyio.get_cancelled_exc_class():  # asyncio's own, which no scope of anyio's shields from
            await self._close_in_time()
            raise

    async def _close_in_time(self) -> None:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CLOSING) as scope:
            try:
                await self._close()
            except Exception:  # the app has not failed, and its server is still to hear of its end
                logger.exception("%s could not be closed", self._what)
        if scope.cancelled_caught:
            logger.warning("%s was not closed within %g s", self._what, _CLOSING)
