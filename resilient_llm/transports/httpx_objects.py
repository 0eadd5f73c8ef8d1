"""What is used of the objects of the httpx family.

httpx and httpx2 have the same shapes and no common types; these are what a type checker is told of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import TracebackType

    from resilient_llm.message import ByteStream, Headers

__all__ = ["NativeHeaders", "NativeRequest", "NativeResponse", "NativeTransport"]


class NativeHeaders(Protocol):
    """What is used of a library's headers."""

    @property
    def raw(self) -> Headers:
        """Give a list of the pairs, a new one each time."""
        ...


class NativeRequest(Protocol):
    """What is used of a library's request."""

    method: str
    stream: ByteStream
    extensions: MutableMapping[str, object]
    headers: NativeHeaders

    @property
    def url(self) -> object:
        """Give an object that writes the URL when it is made a string."""
        ...

    @property
    def content(self) -> bytes:
        """Give the whole body; raises the library's `RequestNotRead` where it was not read."""
        ...


class NativeResponse(Protocol):
    """What is used of a library's response."""

    status_code: int
    stream: ByteStream
    is_closed: bool
    headers: NativeHeaders


class NativeTransport(Protocol):
    """What is used of a library's transport."""

    async def handle_async_request(self, request: object) -> NativeResponse:
        """Exchange a request for a response whose body is still to be read."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...
