"""What the client sends, read ahead of the app so that its leaving is noticed.

One reader of the server's `receive`, bounded. What a disconnect leads to is not decided here.
"""

from __future__ import annotations

from collections import deque

import anyio
from starlette.types import Message, Receive

__all__ = ["Inbox"]


class Inbox:
    """Keep a request's messages between the server and the app, in order.

    `pump` reads on while less than `max_buffered` bytes of the body wait for the app; one message can go
    beyond.
    """

    def __init__(self, receive: Receive, max_buffered: int) -> None:
        self._receive = receive
        self._max_buffered = max_buffered
        self._messages: deque[Message] = deque()
        self._buffered = 0
        self._closed = False
        self._failure: Exception | None = None
        self._arrival: anyio.Event | None = None
        self._room: anyio.Event | None = None

    async def pump(self) -> bool:
        """Read until the client leaves or the inbox is closed, then give `True`; `False` if that fails."""
        more_body = True
        try:
            while True:
                while self._buffered >= self._max_buffered:
                    self._room = anyio.Event()
                    await self._room.wait()
                message = await self._receive()
                if self._closed or message["type"] == "http.disconnect":
                    return True
                self._messages.append(message)
                self._buffered += len(message.get("body", b""))
                self._wake()
                if not more_body:
                    return False  # more than the body and yet no disconnect: not a server to ask again
                more_body = message.get("more_body", False)
        except Exception as error:  # noqa: BLE001 - the app's to see, when it asks for the next message
            self._failure = error
            self._wake()
            return False

    async def receive(self) -> Message:
        """Give the app its next message; one that is there is given without a checkpoint.

        Starlette's `is_disconnected()` asks under a scope that is cancelled already.
        """
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                return {"type": "http.disconnect"}
            if self._arrival is None:
                self._arrival = anyio.Event()
            await self._arrival.wait()
        message = self._messages.popleft()
        self._buffered -= len(message.get("body", b""))
        if self._room is not None and self._buffered < self._max_buffered:
            self._room.set()
        return message

    def close(self) -> None:
        """Give a disconnect from now on, after the messages that are here."""
        self._closed = True
        self._wake()

    def discard(self) -> None:
        """Give a disconnect from now on, as the specification has it once the response is complete."""
        self._messages.clear()
        self._buffered = 0
        self.close()

    def _wake(self) -> None:
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None
