"""One adapter for the two libraries of the httpx family.

httpx and httpx2 have the same shape and refuse each other's objects, so everything that is made
here is made with the library the request came from.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn, Self, cast

from resilient_llm.client import ClientDoor, OnRejection
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.streams import LibraryErrors

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from resilient_llm.call import Policy
    from resilient_llm.message import ByteStream
    from resilient_llm.pipeline import Pipeline
    from resilient_llm.telemetry import Telemetry
    from resilient_llm.transports.httpx_objects import (
        NativeHeaders,
        NativeRequest,
        NativeResponse,
        NativeTransport,
    )

__all__ = ["Family", "FamilyTransport"]


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

    def request(
        self, template: NativeRequest, *, url: str | None, headers: Headers, body: bytes | ByteStream
    ) -> object:
        """Make a request like `template`, to the same URL where none is given."""
        stream: ByteStream
        if isinstance(body, bytes):
            stream = self._library.ByteStream(body)
        else:
            stream = body if isinstance(body, self._library.AsyncByteStream) else self.stream(body)
        target = template.url if url is None or url == str(template.url) else url
        made: object = self._library.Request(
            template.method, target, headers=headers, stream=stream, extensions=template.extensions
        )
        return made

    def response(self, status: int, headers: Headers, body: bytes) -> NativeResponse:
        """Make a response with a body that is still to be read, as from a network."""
        made: NativeResponse = self._library.Response(
            status, headers=headers, stream=self._library.ByteStream(body)
        )
        return made

    def stream(self, stream: ByteStream) -> ByteStream:
        """Wrap a body in the library's own stream class."""
        return cast("ByteStream", self._stream(stream))

    def headers(self, headers: Headers) -> NativeHeaders:
        """Make the library's own headers."""
        made: NativeHeaders = self._library.Headers(headers)
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
        reply = await self._door.handle(self._neutral(cast("NativeRequest", native)))
        response = cast("NativeResponse", reply.native)
        if not reply.complete:
            response.stream = self._family.stream(reply.stream)
        if reply.status != response.status_code:
            response.status_code = reply.status
        came = reply.came if isinstance(reply, _Received) else response.headers.raw
        if reply.headers != came:
            response.headers = self._family.headers(reply.headers)
        return response

    def _neutral(self, native: NativeRequest) -> Request:
        body: bytes | None
        try:
            body = native.content
        except self._family.not_read:
            body = None
        return Request(
            native.method,
            str(native.url),
            native.headers.raw,
            body,
            native=native,
            buffer_upload=None if body is not None else self._buffer_upload(native),
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
            original = request.original
            url = None if original is not None and request.url == original.url else request.url
            native = self._family.request(template, url=url, headers=request.headers, body=body)
        return _Received(await self._transport.handle_async_request(native))

    def _synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        reply = _Received(self._family.response(status, headers, body))
        reply.complete = True  # no attempt depends on its being read
        return reply


class _Received(Reply):
    """A reply that stands for a library's response, and knows with which headers that came.

    The library makes a new list of them, and new pairs in it, whenever it is asked.
    """

    __slots__ = ("came",)

    def __init__(self, response: NativeResponse) -> None:
        headers = response.headers.raw
        super().__init__(response.status_code, headers, response.stream, response, response.is_closed)
        self.came = headers.copy()


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
