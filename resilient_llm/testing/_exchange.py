"""One request and its response between a client and an ASGI app in the same process.

The app runs in a task of its own, as in a server, and meets a client that can be slow or go away.
Nothing of httpx or httpx2 in here: errors are made by a `TransportErrors`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio
import anyio.lowlevel
from starlette.types import ASGIApp, Message, Scope

from ._connection import CONNECTION_EXTENSION
from ._pipe import BytePipe

logger = logging.getLogger("resilient_llm.testing")

AppErrors: TypeAlias = Literal["respond", "raise", "disconnect"]
ErrorFactory: TypeAlias = Callable[[str], Exception]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportErrors:
    """The exceptions of one HTTP library that a connection can end with."""

    connect_timeout: ErrorFactory
    read_timeout: ErrorFactory
    write_timeout: ErrorFactory
    read_error: ErrorFactory
    remote_protocol_error: ErrorFactory


class Exchange:
    """Carry one request to an ASGI app, and its response back.

    The app's side is `run`; the client's side is `upload`, `wait_for_head`, `body` and
    `disconnect`, called from whatever tasks the client likes.
    """

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        errors: TransportErrors,
        *,
        timeouts: Mapping[str, float | None],
        max_buffer: int,
        disconnect_grace: float,
        app_errors: AppErrors,
    ) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.ended = anyio.Event()  # the app has returned
        self._app = app
        self._scope = {**scope, "extensions": {CONNECTION_EXTENSION: {}}}
        self._errors = errors
        self._timeouts = timeouts
        self._disconnect_grace = disconnect_grace
        self._app_errors = app_errors
        self._upload = BytePipe(max_buffer)
        self._download = BytePipe(max_buffer)
        self._answered = anyio.Event()  # the head of the response is there, or never will be
        self._over = anyio.Event()  # nothing passes any more: complete, broken, or left by the client
        self._complete = False
        self._body_received = False
        self._cancel_scope = anyio.CancelScope()

    async def run(self) -> None:
        """Run the app to its end. Its failure is the response's, and does not leave this function."""
        try:
            with self._cancel_scope:
                try:
                    await self._app(self._scope, self._receive, self._send)
                    self._check_complete()
                except Exception as error:  # noqa: BLE001 - a server outlives whatever its app raises
                    await self._fail(error)
        finally:
            self._break(self._errors.remote_protocol_error)
            self.ended.set()

    def cancel(self) -> None:
        """Cancel the app; a client still reading sees the connection close."""
        self._cancel_scope.cancel()

    async def upload(self, chunks: AsyncIterable[bytes]) -> None:
        """Send the request's body, at the pace at which the app takes it."""
        iterator = aiter(chunks)
        try:
            async for chunk in iterator:
                if self._over.is_set():
                    return
                with anyio.move_on_after(self._timeouts.get("write")) as clock:
                    await self._upload.write(chunk)
                if clock.cancelled_caught:
                    raise self._errors.write_timeout("timed out")
            self._upload.end()
        finally:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()

    async def wait_for_head(self) -> None:
        """Wait for `status` and `headers`."""
        with anyio.move_on_after(self._timeouts.get("read")) as clock:
            await self._answered.wait()
        if clock.cancelled_caught:
            raise self._errors.read_timeout("timed out")
        if not self.status:
            await self._download.read()  # raises what became of the connection

    async def read(self) -> bytes:
        """Return the next part of the response's body, b"" at its end; a failure disconnects."""
        try:
            with anyio.move_on_after(self._timeouts.get("read")):
                await anyio.lowlevel.checkpoint()
                return await self._download.read()
        except BaseException:
            self.disconnect()
            raise
        self.disconnect()
        raise self._errors.read_timeout("timed out")

    def disconnect(self) -> None:
        """Go away as the client. The app is told, and is cancelled if it has not ended by itself in time."""
        self._download.close()
        if not self._over.is_set():
            self._finish()
            self._cancel_scope.deadline = anyio.current_time() + self._disconnect_grace

    def _check_complete(self) -> None:
        if not self._over.is_set():
            raise RuntimeError("the ASGI app returned without completing its response")

    async def _receive(self) -> Message:
        # A message that is there is given without a checkpoint: Starlette's `is_disconnected()` relies on it.
        if not self._body_received and not self._over.is_set():
            chunk = await self._upload.read()
            self._body_received = self._upload.at_end
            if not self._over.is_set():
                return {"type": "http.request", "body": chunk, "more_body": not self._body_received}
        if not self._over.is_set():
            await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if self._complete:
            raise RuntimeError(f"unexpected ASGI message {kind!r} after the response was completed")
        if kind == CONNECTION_EXTENSION:
            reset = message["how"] == "reset"
            self._break(self._reset if reset else self._errors.remote_protocol_error)
        elif not self._over.is_set():  # what is sent to a client that has gone is dropped, as servers do
            expected = "http.response.body" if self._answered.is_set() else "http.response.start"
            if kind != expected:
                raise RuntimeError(f"expected ASGI message {expected!r}, got {kind!r}")
            if self._answered.is_set():
                await self._send_body(message)
            else:
                self.status = message["status"]
                self.headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
                self._answered.set()

    async def _send_body(self, message: Message) -> None:
        if self._scope["method"] != "HEAD":
            await self._download.write(message.get("body", b""))
        if not message.get("more_body", False) and not self._over.is_set():
            self._complete = True
            self._download.end()
            self._finish()

    async def _fail(self, error: Exception) -> None:
        if self._app_errors == "raise" and not self._over.is_set():
            self._break(lambda _: error)
            return
        # An app may fail because its client left; a background task that fails is worth knowing of.
        level = logging.DEBUG if self._over.is_set() and not self._complete else logging.ERROR
        logger.log(level, "exception in ASGI app", exc_info=error)
        if self._app_errors == "respond" and not self._answered.is_set():
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21")]
            await self._send({"type": "http.response.start", "status": 500, "headers": headers})
            await self._send({"type": "http.response.body", "body": b"Internal Server Error"})
        else:
            self._break(self._errors.remote_protocol_error)

    def _reset(self, _: str) -> Exception:
        return self._errors.read_error("connection reset by peer")

    def _break(self, error: ErrorFactory) -> None:
        if self._over.is_set():
            return
        if self._answered.is_set():
            message = "peer closed connection without sending complete message body (incomplete chunked read)"
        else:
            message = "Server disconnected without sending a response."
        self._download.end(lambda: error(message))
        self._finish()
        self._answered.set()

    def _finish(self) -> None:
        self._over.set()
        self._upload.end()
        self._upload.close()
