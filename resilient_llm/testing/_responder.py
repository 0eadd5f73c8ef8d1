"""One ASGI response on its way out, written down in the request's record as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import anyio
from starlette.types import Send

from ._request_log import ProviderRequest

Ending: TypeAlias = Literal["reset", "close"] | None
"""How a response ends: its connection broken, or as it should."""


class Responder:
    """Send one response: `start`, `write` any number of times, `finish`."""

    def __init__(
        self,
        send: Send,
        request: ProviderRequest,
        headers: Mapping[str, str],
        before_end: Callable[[ProviderRequest], None],
    ) -> None:
        """Call `before_end` when all but the end has been sent."""
        self._send = send
        self._request = request
        self._headers = {name.lower(): value for name, value in headers.items()}
        self._before_end = before_end
        self._chunk_size = request.fault.chunk_size

    async def start(self, status: int, content_type: str, length: int | None = None) -> None:
        """Send the head. The constructor's headers win over those made here."""
        headers = {"content-type": content_type, **self._headers}
        if length is not None:
            headers.setdefault("content-length", str(length))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._request.status = status
        self._request.answered = anyio.current_time()
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Send a part of the body."""
        size = self._chunk_size or len(data)
        for start in range(0, len(data), size or 1):
            await self._send(
                {"type": "http.response.body", "body": data[start : start + size], "more_body": True}
            )

    async def finish(self) -> None:
        """End the body."""
        self._request.complete = True
        self._before_end(self._request)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(self, status: int, content_type: str, body: bytes) -> None:
        """Send a whole response."""
        await self.start(status, content_type, len(body))
        await self.write(body)
        await self.finish()
