"""Reply bodies on their way to the caller, and the end of an attempt that they bring.

Bytes pass as they came. What is watched here is only how a body ends: read to its end, broken,
out of time, closed early, or forgotten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio

from resilient_llm.outcome import CANCELLED, DEADLINE_EXCEEDED, Outcome

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop
    from resilient_llm.call import Call
    from resilient_llm.message import ByteStream

__all__ = ["AttemptStream", "BufferedStream", "LibraryErrors", "ReadTimedOutError", "Source", "read_up_to"]

Taken = TypeVar("Taken")

_CLOSING = 1.0
"""Seconds that closing a body may take; whoever waits for the permits behind it waits no longer."""


class LibraryErrors(NamedTuple):
    """Make the exceptions of the HTTP library above, for what its transport does not know of."""

    timed_out: Callable[[str], Exception]
    broken: Callable[[str], Exception]


class BufferedStream:
    """Give bytes that were read before, then whatever is left of the stream they came from.

    Without a rest it can be read again and again.
    """

    __slots__ = ("_chunks", "_rest")

    def __init__(self, chunks: Iterable[bytes], rest: ByteStream | None = None) -> None:
        self._chunks = deque(chunks)
        self._rest = rest

    @property
    def whole(self) -> bool:
        """Tell whether nothing is left to read from the network."""
        return self._rest is None

    def __aiter__(self) -> AsyncIterator[bytes]:
        # No generator: one that is left half way is the garbage collector's to close, in whatever task.
        if self._rest is None:
            return _Replay(self._chunks.copy(), None)
        return _Replay(self._chunks, self._rest.__aiter__())

    async def aclose(self) -> None:
        """Close what is left of the stream."""
        if self._rest is not None:
            await self._rest.aclose()


class _Replay:
    """Iterate over chunks, letting go of each, then over what follows them."""

    __slots__ = ("_chunks", "_rest")

    def __init__(self, chunks: deque[bytes], rest: AsyncIterator[bytes] | None) -> None:
        self._chunks = chunks
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._chunks:
            return self._chunks.popleft()
        if self._rest is None:
            raise StopAsyncIteration
        return await self._rest.__anext__()


class _Resumed:
    """The rest of a stream whose iteration has begun."""

    __slots__ = ("_iterator", "_stream")

    def __init__(self, iterator: AsyncIterator[bytes], stream: ByteStream) -> None:
        self._iterator = iterator
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._iterator

    async def aclose(self) -> None:
        await _close(self._stream, self._iterator)


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
        await _abandon(stream, iterator)
        raise
    await _close(stream, iterator)
    return b"".join(chunks), BufferedStream(chunks)


async def _close(stream: ByteStream, iterator: AsyncIterator[bytes] | None) -> None:
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


async def _abandon(stream: ByteStream, iterator: AsyncIterator[bytes] | None) -> None:
    """Close a stream that has failed, whose own error is the one to be told."""
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CLOSING), suppress(Exception):
        await _close(stream, iterator)


class ReadTimedOutError(Exception):
    """A read from the network took longer than it may; the connection is closed."""


class Source:
    """A reply's body as it comes from the network: read by one task at a time, closed by any."""

    __slots__ = ("_closed", "_ended", "_iterator", "_loop", "_reading", "_scope", "_stream")

    def __init__(self, stream: ByteStream, loop: EventLoop) -> None:
        self._stream = stream
        self._loop = loop
        self._iterator: AsyncIterator[bytes] | None = None
        self._reading = False
        self._scope: anyio.CancelScope | None = None
        self._ended = False
        self._closed = False

    async def read(self, take: Callable[[bytes], Taken], until: float = math.inf) -> Taken | None:
        """Read on until `take` makes something of what comes, and give that; `None` at the end.

        `until` is on `anyio.current_time()`'s clock. A body that fails is closed. Raises `ReadTimedOutError`,
        `BusyResourceError` when another task is reading, and whatever the stream raises, as it may when another
        task closes it; else `ClosedResourceError` then.
        """
        if self._reading:
            raise anyio.BusyResourceError("reading from")
        if self._ended or self._closed:
            return None
        if self._iterator is None:
            self._iterator = self._stream.__aiter__()
        self._reading = True
        try:
            if until == math.inf:
                return await self._read(self._iterator, take)
            # One scope for all that has to be read now, never one held while the consumer has the stream.
            with self._loop.scope(deadline=until) as self._scope:
                return await self._read(self._iterator, take)
        except BaseException:
            await self._give_up()
            raise
        finally:
            self._reading = False
            self._scope = None
        if self._closed:
            raise anyio.ClosedResourceError
        await self._give_up()
        raise ReadTimedOutError

    async def _read(self, iterator: AsyncIterator[bytes], take: Callable[[bytes], Taken]) -> Taken | None:
        try:
            while True:
                taken = take(await iterator.__anext__())
                if taken:
                    return taken
        except StopAsyncIteration:
            self._ended = True
            return None

    async def aclose(self) -> None:
        """Close the body, in a second at most, wherever its reader has left it; one who is inside is sent away."""
        if self._closed:
            return
        self._closed = True
        if self._scope is not None:
            self._scope.cancel()
        with self._loop.scope(shield=True, deadline=self._loop.time() + _CLOSING):
            await _close(self._stream, self._iterator)

    async def _give_up(self) -> None:
        if not self._closed:
            self._closed = True
            await _abandon(self._stream, self._iterator)


class AttemptStream:
    """Relay a reply's body as it comes, and finish its attempt when the body ends, however it ends.

    `ended` is the outcome when it is read to its end; `meaning` says what an exception of the transport
    means; a passed deadline is the library's own timeout to the caller.
    """

    __slots__ = ("_attempt", "_ended", "_errors", "_meaning", "_over", "_source")

    def __init__(
        self,
        stream: ByteStream,
        attempt: Call,
        *,
        ended: Outcome,
        meaning: Callable[[BaseException, Call], Outcome],
        errors: LibraryErrors,
    ) -> None:
        self._source = Source(stream, attempt.loop)
        self._attempt = attempt
        self._ended = ended
        self._meaning = meaning
        self._errors = errors
        self._over = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        attempt = self._attempt
        try:
            chunk = await self._source.read(_whatever, attempt.deadline)
        except anyio.BusyResourceError:
            raise
        except ReadTimedOutError as error:
            await attempt.end(DEADLINE_EXCEEDED)
            raise self._errors.timed_out(
                "the call's deadline passed while its reply was being read"
            ) from error
        except BaseException as error:
            await attempt.end(CANCELLED if self._over else self._meaning(error, attempt))
            raise
        if chunk is None:
            await attempt.end(CANCELLED if self._over else self._ended)
            raise StopAsyncIteration
        if attempt.first_chunk is None:
            attempt.first_chunk = attempt.loop.time()
        return chunk

    async def aclose(self) -> None:
        """Close the reply; before its end this abandons the call."""
        self._over = True
        try:
            await self._source.aclose()
        finally:
            await self._attempt.end(CANCELLED)

    def __del__(self) -> None:
        # The last resort for a stream nobody closed: give back what it held, in the call's own loop.
        attempt = self._attempt
        if not attempt.finished:
            attempt.loop.post(lambda: attempt.finish(CANCELLED))


def _whatever(chunk: bytes) -> bytes:
    return chunk
