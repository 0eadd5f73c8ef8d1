"""What carries requests to providers, behind one small interface, so that a faster one can take its place.

`resilient_llm.transports.http1.Http1Transport` is what the server uses. Policies, headers that must not be
forwarded and the client's side of it are not seen here.
"""

from __future__ import annotations

from typing import Protocol

from resilient_llm.message import Headers, Reply, Request
from resilient_llm.streams import LibraryErrors

__all__ = ["Engine"]


class Engine(Protocol):
    """Send requests as they are, over connections that it keeps.

    It runs outside of every `ambient`: what a request inherits, its call has already.
    """

    @property
    def errors(self) -> LibraryErrors:
        """Give its exceptions for a body that came too late, or broke off."""
        ...

    async def __call__(self, request: Request) -> Reply:
        """Send a request and give its reply, whose body is still to be read."""
        ...

    def synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        """Make a reply that no provider gave."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...
