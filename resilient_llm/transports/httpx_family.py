"""One adapter for the two libraries of the httpx family.

httpx and httpx2 have the same shape and refuse each other's objects, so everything that is made
here is made with the library the request came from.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol, Self, cast

from resilient_llm.client import ClientDoor, OnRejection
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.streams import LibraryErrors

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import ModuleType, TracebackType

    from resilient_llm.call import Policy
    from resilient_llm.message import ByteStream
    from resilient_llm.pipeline import Pipeline
    from resilient_llm.telemetry import Telemetry

__all__ = ["Family", "FamilyTransport"]


class NativeHeaders(Protocol):
    """What is used of a library's headers."""

    @property
    def raw(self) -> Headers: ...


class NativeRequest(Protocol):
    """What is used of a library's request."""

    method: str
    stream: ByteStream
    extensions: MutableMapping[str, object]
    headers: NativeHeaders

    @property
    def url(self) -> object: ...
    @property
    def content(self) -> bytes: ...


class NativeResponse(Protocol):
    """What is used of a library's response."""

    status_code: int
    stream: ByteStream
    is_closed: bool
    headers: NativeHeaders


class NativeTransport(Protocol):
    """What is used of a library's transport."""

    async def handle_async_request(self, request: object) -> object: ...
    async def aclose(self) -> None: ...
    async def __aenter__(self) -> object: ...
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...


class Family:
    """Make one library's own objects; `library` is the module httpx or httpx2."""

    def __init__(self, library: ModuleType) -> None:
        self.name = library.__name__
        self.not_read: type[Exception] = library.RequestNotRead
        self._library = library
        base: type = library.AsyncByteStream
        self._stream = type(
            "RelayStream", (_Relay, base), {"__doc__": "A body on its way through the pipeline."}
        )

    def request(self, template: object, *, url: str, headers: Headers, body: bytes | ByteStream) -> object:
        """Make a request like `template`."""
        seen = cast("NativeRequest", template)
        stream: object = self._library.ByteStream(body) if isinstance(body, bytes) else body
        if not isinstance(stream, self._library.AsyncByteStream):
            stream = self.stream(cast("ByteStream", stream))
        target = seen.url if url == str(seen.url) else url
        made: object = self._library.Request(
            seen.method, target, headers=headers, stream=stream, extensions=seen.extensions
        )
        return made

    def response(self, status: int, headers: Headers, body: bytes) -> NativeResponse:
        """Make a response with a body that is still to be read, as from a network."""
        response = self._library.Response(status, headers=headers, stream=self._library.ByteStream(body))
        return cast("NativeResponse", response)

    def stream(self, stream: ByteStream) -> ByteStream:
        """Wrap a body in the library's own stream class."""
        return cast("ByteStream", self._stream(stream))

    def headers(self, headers: Headers) -> object:
        """Make the library's own headers."""
        made: object = self._library.Headers(headers)
        return made

    @property
    def errors(self) -> LibraryErrors:
        """Give the library's own exceptions for a read that took too long and a body that broke off."""
        return LibraryErrors(timed_out=self._library.ReadTimeout, broken=self._library.RemoteProtocolError)

    def transport(self) -> NativeTransport:
        """Make a real transport whose pool never becomes the queue."""
        limits = self._library.Limits(max_connections=None, max_keepalive_connections=100)
        return cast("NativeTransport", self._library.AsyncHTTPTransport(limits=limits))

    def check(self, transport: object) -> None:
        """Raise `TypeError` when `transport` is none of this library's async transports."""
        if isinstance(transport, self._library.AsyncBaseTransport):
            return
        if isinstance(transport, self._library.BaseTransport):
            refuse_sync(self.name)
        msg = f"transport must be an async transport of {self.name} ({self.name}.AsyncBaseTransport), not {transport!r}"
        raise TypeError(msg)


class _Relay:
    """The part of a library's stream that hands on a neutral one."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        await self._stream.aclose()


class FamilyTransport:
    """Everything a `ResilientTransport` does, for either library."""

    _family: ClassVar[Family]

    def _build(
        self,
        transport: object,
        *,
        policies: Sequence[Policy],
        on_rejection: OnRejection,
        name: str,
        telemetry: Telemetry | None,
    ) -> None:
        family = self._family
        if transport is None:
            transport = family.transport()
        family.check(transport)
        self._transport = cast("NativeTransport", transport)
        self._door = ClientDoor(
            self._send,
            synthesise=self._synthesise,
            errors=family.errors,
            policies=policies,
            on_rejection=on_rejection,
            name=name,
            telemetry=telemetry,
        )

    @property
    def pipeline(self) -> Pipeline:
        """Give the pipeline, for `describe()`."""
        return self._door.pipeline

    def handle_request(self, _request: object) -> NoReturn:
        """Refuse a synchronous client with a `TypeError` that says what to do."""
        refuse_sync(self._family.name)

    def __enter__(self) -> NoReturn:
        """Refuse a synchronous client with a `TypeError` that says what to do."""
        refuse_sync(self._family.name)

    def __exit__(self, *_exc_info: object) -> None:
        """Do nothing: it was never entered."""

    def close(self) -> None:
        """Do nothing, for a synchronous client that is closed without having been used."""

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._transport.__aexit__(exc_type, exc_value, traceback)

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._transport.aclose()

    async def _handle(self, native: object) -> object:
        """Answer a native request with a native response."""
        reply = await self._door.handle(self._neutral(native))
        response = cast("NativeResponse", reply.native)
        if not reply.complete:
            response.stream = self._family.stream(reply.stream)
        if reply.status != response.status_code:
            response.status_code = reply.status
        if reply.headers != response.headers.raw:
            response.headers = cast("NativeHeaders", self._family.headers(reply.headers))
        return response

    def _neutral(self, native: object) -> Request:
        seen = cast("NativeRequest", native)
        body: bytes | None
        try:
            body = seen.content
        except self._family.not_read:
            body = None
        return Request(
            seen.method,
            str(seen.url),
            seen.headers.raw,
            body,
            native=native,
            buffer_upload=None if body is not None else self._buffer_upload(seen),
        )

    def _buffer_upload(self, native: NativeRequest) -> Callable[[int], Awaitable[Request]]:
        async def buffer(limit: int) -> Request:
            url, headers = str(native.url), native.headers.raw
            chunks: list[bytes] = []
            size = 0
            iterator = native.stream.__aiter__()
            async for chunk in iterator:
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    rest = self._family.request(
                        native, url=url, headers=headers, body=_Chain(chunks, iterator)
                    )
                    return Request(native.method, url, headers, None, native=rest)
            return Request(native.method, url, headers, b"".join(chunks), template=native)

        return buffer

    async def _send(self, request: Request) -> Reply:
        native = request.native
        if native is None:
            template = cast("NativeRequest", request.template)
            body = template.stream if request.body is None else request.body
            native = self._family.request(template, url=request.url, headers=request.headers, body=body)
        response = await self._transport.handle_async_request(native)
        return self._reply(cast("NativeResponse", response))

    def _reply(self, response: NativeResponse) -> Reply:
        return Reply(
            response.status_code,
            response.headers.raw,
            response.stream,
            native=response,
            complete=response.is_closed,
        )

    def _synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        reply = self._reply(self._family.response(status, headers, body))
        reply.complete = True  # no attempt depends on its being read
        return reply


class _Chain:
    """An upload whose beginning was read already."""

    def __init__(self, chunks: list[bytes], rest: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        async for chunk in self._rest:
            yield chunk

    async def aclose(self) -> None:
        """Leave closing to whoever made the upload."""


def refuse_sync(library: str) -> NoReturn:
    """Raise the `TypeError` that tells users of a synchronous client the way to do it."""
    msg = (
        f"ResilientTransport is asynchronous: use it with {library}.AsyncClient (AsyncOpenAI, AsyncAnthropic ...); "
        "around synchronous code use a Pipeline: `await Pipeline(policies).run(function, ...)`"
    )
    raise TypeError(msg)
