"""Reply bodies on their way to the caller, and the end of an attempt that they bring.

Bytes pass as they came. What is watched here is only how a body ends: read to its end, broken,
out of time, closed early, or forgotten.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING

import anyio

from resilient_llm.outcome import CANCELLED, DEADLINE_EXCEEDED, Outcome

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import ByteStream

__all__ = ["AttemptStream", "BufferedStream", "ReadTimedOutError", "Source", "read_up_to"]


class BufferedStream:
    """Give bytes that were read before, then whatever is left of the stream they came from."""

    __slots__ = ("_chunks", "_rest")

    def __init__(self, chunks: list[bytes], rest: ByteStream | None = None) -> None:
        self._chunks = chunks
        self._rest = rest

    @property
    def whole(self) -> bool:
        """Tell whether nothing is left to read from the network."""
        return self._rest is None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        if self._rest is not None:
            async for chunk in self._rest:
                yield chunk

    async def aclose(self) -> None:
        """Close what is left of the stream."""
        if self._rest is not None:
            await self._rest.aclose()


class _Resumed:
    """The rest of a stream whose iteration has begun."""

    __slots__ = ("_iterator", "_stream")

    def __init__(self, iterator: AsyncIterator[bytes], stream: ByteStream) -> None:
        self._iterator = iterator
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._iterator

    async def aclose(self) -> None:
        await close_stream(self._stream, self._iterator)


async def read_up_to(stream: ByteStream, limit: int) -> tuple[bytes, BufferedStream]:
    """Read a body of at most `limit` bytes and close it.

    Returns what was read and a stream that gives it again; a longer body is left open, and the
    stream goes on where reading stopped. Raises what the stream raises, after closing it.
    """
    chunks: list[bytes] = []
    size = 0
    iterator = stream.__aiter__()
    try:
        async for chunk in iterator:
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                return b"".join(chunks), BufferedStream(chunks, _Resumed(iterator, stream))
    except BaseException:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
            await close_stream(stream, iterator)
        raise
    await close_stream(stream, iterator)
    return b"".join(chunks), BufferedStream(chunks)


async def close_stream(stream: ByteStream, iterator: AsyncIterator[bytes] | None) -> None:
    """Close a stream and the iterator somebody may have left half way."""
    try:
        if isinstance(iterator, AsyncGenerator):
            try:
                await iterator.aclose()
            except RuntimeError as error:
                # Another task is inside it; closing the stream below makes that one end.
                if "already running" not in str(error):
                    raise
    finally:
        await stream.aclose()


class ReadTimedOutError(Exception):
    """A read from the network took longer than it may; the connection is closed."""


class Source:
    """A reply's body as it comes from the network."""

    __slots__ = ("_iterator", "_stream")

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._iterator: AsyncIterator[bytes] | None = None

    async def read(self, until: float = math.inf) -> bytes | None:
        """Give the next bytes, or `None` at the end; `until` is on `anyio.current_time()`'s clock.

        Raises `ReadTimedOutError` and whatever the stream raises.
        """
        if self._iterator is None:
            self._iterator = self._stream.__aiter__()
        try:
            if until == math.inf:
                return await self._iterator.__anext__()
            # One scope for each read from the network, never one held while the consumer has the stream.
            with anyio.CancelScope(deadline=until):
                return await self._iterator.__anext__()
        except StopAsyncIteration:
            return None
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
            await self.aclose()
        raise ReadTimedOutError

    async def aclose(self) -> None:
        """Close the stream, wherever its reader has left it."""
        await close_stream(self._stream, self._iterator)


class AttemptStream:
    """Relay a reply's body as it comes, and finish its attempt when the body ends, however it ends.

    `ended` is the outcome when it is read to its end; `meaning` says what an exception of the transport
    means; `timed_out` makes the exception a caller sees when the deadline passes.
    """

    __slots__ = ("_attempt", "_ended", "_meaning", "_source", "_timed_out")

    def __init__(
        self,
        source: Source,
        attempt: Call,
        *,
        ended: Outcome,
        meaning: Callable[[BaseException, Call], Outcome],
        timed_out: Callable[[str], Exception],
    ) -> None:
        self._source = source
        self._attempt = attempt
        self._ended = ended
        self._meaning = meaning
        self._timed_out = timed_out

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        attempt = self._attempt
        try:
            chunk = await self._source.read(attempt.deadline)
        except ReadTimedOutError as error:
            await attempt.end(DEADLINE_EXCEEDED)
            raise self._timed_out("the call's deadline passed while its reply was being read") from error
        except BaseException as error:
            await attempt.end(self._meaning(error, attempt))
            raise
        if chunk is None:
            await attempt.end(self._ended)
            raise StopAsyncIteration
        if attempt.first_chunk is None:
            attempt.first_chunk = attempt.loop.time()
        return chunk

    async def aclose(self) -> None:
        """Close the reply; before its end this abandons the call."""
        try:
            await self._source.aclose()
        finally:
            await self._attempt.end(CANCELLED)

    def __del__(self) -> None:
        # The last resort for a stream nobody closed: give back what it held, in the call's own loop.
        attempt = self._attempt
        if not attempt.finished:
            attempt.loop.post(lambda: attempt.finish(CANCELLED))
