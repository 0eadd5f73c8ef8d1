"""A server's side of one request, in memory: what uvicorn does with its messages, without a socket."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Headers = Sequence[tuple[bytes, bytes]]

TENANT = (b"x-tenant-id", b"acme")


class ClientGoneError(OSError):
    """What a server of specification 2.4 raises from `send` once the client has left."""


class Connection:
    """Carry one request to an app, and log every message with its time.

    The chunks of the body are there at once; `feed` adds more of an `unfinished` one.
    """

    def __init__(
        self,
        *chunks: bytes,
        method: str = "GET",
        path: str = "/",
        headers: Headers = (TENANT,),
        spec_version: str = "2.3",
        client: tuple[str, int] | None = ("192.0.2.7", 50000),
        unfinished: bool = False,
    ) -> None:
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"secret=1",
            "root_path": "",
            "headers": list(headers),
            "client": client,
            "server": ("testserver", 80),
            "state": {},
        }
        self.send_raises = spec_version >= "2.4"
        self.sent: list[tuple[float, Message]] = []
        self.received: list[tuple[float, Message]] = []
        self.asked: list[float] = []
        """When the app (or a middleware) called `receive`."""
        self.dropped: list[Message] = []
        """What was sent to a client that had left."""
        self.error: BaseException | None = None
        self.ended: float | None = None
        self.gone = False
        self.complete = False
        self.stalled = False
        """Whether the client takes nothing any more, so that `send` blocks."""
        self._began = anyio.current_time()
        self._chunks = list(chunks) or [b""]
        self._unfinished = unfinished
        self._changed = anyio.Event()

    async def run(self, app: ASGIApp) -> Connection:
        """Run the app to its end; keep its error, as a server would log it."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:  # noqa: BLE001 - whatever leaves the app
            self.error = error
        finally:
            self.ended = self.now()
        return self

    async def receive(self) -> Message:
        """Give the next message, a disconnect before anything that is left of the body."""
        self.asked.append(self.now())
        while not (self.gone or self.complete or self._chunks):
            await self._changed.wait()
        message: Message = {"type": "http.disconnect"}
        if not (self.gone or self.complete):
            chunk = self._chunks.pop(0)
            message = {
                "type": "http.request",
                "body": chunk,
                "more_body": bool(self._chunks) or self._unfinished,
            }
        self.received.append((self.now(), message))
        return message

    async def send(self, message: Message) -> None:
        """Take the app's next message; once the client has left, drop it (2.3) or raise (2.4)."""
        await anyio.lowlevel.checkpoint()
        while self.stalled and not self.gone:
            await self._changed.wait()
        if self.gone:
            self.dropped.append(message)
            if self.send_raises:
                raise ClientGoneError("connection lost")
            return
        first = not self.sent
        if self.complete or first is (message["type"] == "http.response.body"):
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        self.sent.append((self.now(), message))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
            self._notify()

    def feed(self, chunk: bytes, *, more_body: bool = False) -> None:
        """Let more of the body arrive."""
        self._chunks.append(chunk)
        self._unfinished = more_body
        self._notify()

    def disconnect(self) -> None:
        """Let the client go away."""
        self.gone = True
        self._notify()

    async def disconnect_at(self, delay: float) -> None:
        """Let the client go away in a while."""
        await anyio.sleep(delay)
        self.disconnect()

    def now(self) -> float:
        """Give the time since the request was made, rounded so that logs can be compared."""
        return round(anyio.current_time() - self._began, 6)

    @property
    def messages(self) -> list[Message]:
        """Give what was sent, without the times."""
        return [message for _, message in self.sent]

    @property
    def status(self) -> int | None:
        """Give the response's status, if there is a response."""
        status: int | None = self.messages[0]["status"] if self.sent else None
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Give the response's headers."""
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        """Give all of the response's body."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        """Give the response's body, parsed."""
        return json.loads(self.body)

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


async def respond(send: Send, status: int = 200, body: bytes = b"ok", *, headers: Headers = ()) -> None:
    """Send a whole response."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Receive) -> bytes:
    """Read a request's body to its end."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left while it sent its body")
        body += message["body"]
        if not message["more_body"]:
            return body
