"""A stream on its way to its caller, and a copy of what passes.

It says once how that ended. What is done with the copy is not decided in here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop
    from resilient_llm.message import ByteStream

__all__ = ["RecordedStream"]

_LAST_EVENT = b"data: [DONE]"
"""Where SDKs leave a stream of HTTP/2 without reading to its end."""


class RecordedStream:
    """Relay a stream and keep a copy of it, of at most `max_size` bytes.

    `done` is called once, in the event loop: with the body when it was read to its end; with `None` and whether it was
    `too_large` as soon as that is known; with `None` when the stream is closed before its end, or dropped.
    """

    def __init__(
        self,
        stream: ByteStream,
        loop: EventLoop,
        done: Callable[[bytes | None, bool], Awaitable[None]],
        abandoned: Callable[[], None],
        *,
        max_size: int,
    ) -> None:
        self.stream = stream
        self._iterator: AsyncIterator[bytes] | None = None
        self._loop = loop
        self._done: Callable[[bytes | None, bool], Awaitable[None]] | None = done
        self._abandoned = abandoned
        self._max_size = max_size
        self._chunks: list[bytes] = []
        self._size = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._iterator is None:
            self._iterator = self.stream.__aiter__()
        try:
            chunk = await self._iterator.__anext__()
        except StopAsyncIteration:
            await self._finish(whole=True)
            raise
        if self._done is not None:
            self._size += len(chunk)
            if self._size > self._max_size:
                await self._finish(whole=False)
            else:
                self._chunks.append(chunk)
        return chunk

    async def aclose(self) -> None:
        """Close the stream; before its end nothing is kept of it."""
        try:
            await self.stream.aclose()
        finally:
            await self._finish(whole=b"".join(self._chunks[-2:]).rstrip().endswith(_LAST_EVENT))

    async def _finish(self, *, whole: bool) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        chunks, self._chunks = self._chunks, []
        await done(b"".join(chunks) if whole else None, self._size > self._max_size)

    def __del__(self) -> None:
        # The last resort for a stream nobody closed: who waits for it may go on.
        if self._done is not None:
            self._loop.post(self._abandoned)
