"""Reply bodies on their way to the caller, and the end of an attempt that they bring.

Bytes pass as they came. What is watched here is only how a body ends: read to its end, broken,
out of time, closed early, or forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import anyio

from resilient_llm.outcome import CANCELLED, DEADLINE_EXCEEDED, Outcome
from resilient_llm.source import ReadTimedOutError, Source, abandon, close

if TYPE_CHECKING:
    from resilient_llm.attempt_clock import AttemptClock
    from resilient_llm.call import Call
    from resilient_llm.message import ByteStream

__all__ = ["AttemptStream", "BufferedStream", "LibraryErrors", "read_up_to"]


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

    @property
    def chunks(self) -> Iterable[bytes]:
        """Give what was read before, and has not been given since."""
        return self._chunks

    def body(self, limit: int) -> bytes | None:
        """Give all there is, if it is whole and at most `limit` bytes, as an answer mostly is."""
        if self._rest is not None:
            return None
        body = b"".join(self._chunks)
        return body if len(body) <= limit else None

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
        await close(self._stream, self._iterator)


async def read_up_to(stream: ByteStream, limit: int) -> tuple[bytes, BufferedStream]:
    """Read a body of at most `limit` bytes and close it.

    Returns what was read and a stream that gives it again; a longer body is left open, and the
    stream goes on where reading stopped. Raises what the stream raises, after closing it.
    """
    if isinstance(stream, BufferedStream):
        body = stream.body(limit)
        if body is not None:
            return body, stream
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
        await abandon(stream, iterator)
        raise
    await stream.aclose()  # the iterator is at its end
    return b"".join(chunks), BufferedStream(chunks)


class AttemptStream:
    """Relay a reply's body as it comes, and finish its attempt when the body ends, however it ends.

    `ended` is the outcome when it is read to its end; `meaning` says what an exception of the transport
    means; a passed deadline, or limit of the attempt's, is the library's own timeout to the caller.
    """

    __slots__ = ("_attempt", "_clock", "_ended", "_errors", "_meaning", "_over", "_source")

    def __init__(
        self,
        stream: ByteStream,
        attempt: Call,
        *,
        ended: Outcome,
        clock: AttemptClock | None,
        meaning: Callable[[BaseException, Call], Outcome],
        errors: LibraryErrors,
    ) -> None:
        self._clock = clock
        self._source = Source(stream, attempt.loop)
        self._attempt = attempt
        self._ended = ended
        self._meaning = meaning
        self._errors = errors
        self._over = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        attempt, clock = self._attempt, self._clock
        until = attempt.deadline if clock is None else min(attempt.deadline, clock.limit)
        try:
            chunk = await self._source.read(_whatever, until)
        except anyio.BusyResourceError:
            raise
        except ReadTimedOutError as error:
            late = clock is not None and until < attempt.deadline
            outcome = clock.expired() if clock is not None and late else DEADLINE_EXCEEDED
            await attempt.end(outcome)
            msg = "the attempt took too long" if late else "the call's deadline passed"
            raise self._errors.timed_out(f"{msg} while its reply was being read") from error
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
            attempt.loop.post(lambda: attempt.finish_alone(CANCELLED))


def _whatever(chunk: bytes) -> bytes:
    return chunk
