"""A client that leaves while it is answered ends what is done for it.

The server of this package says so by itself, which costs a request next to nothing. Under any other a task of its own
listens for it. What a body or an answer is, is not seen here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
from starlette.types import Receive, Scope

from resilient_llm.asgi.listening import while_listening

if TYPE_CHECKING:
    from types import TracebackType

    from resilient_llm._loop import EventLoop
    from resilient_llm.message import Headers
    from resilient_llm.outlet import Outlet
    from resilient_llm.sidecar.rejection import Rejection

__all__ = ["EMPTY_QUERY", "EXTENSION", "Connection", "UnlessGone", "connection_of", "listening"]

EXTENSION = "resilient_llm.connection"
"""The name of an ASGI extension: the `Connection` that a request came over."""
EMPTY_QUERY = "resilient_llm.empty_query"
"""The name of another: there where a request has a query with nothing in it, which ASGI does not tell from none."""


class Connection(Protocol):
    """What a server knows of the connection of a request."""

    @property
    def rejection(self) -> Rejection | None:
        """Give what the server told the client in the place of the app's answer."""
        ...

    def has_whole_body(self) -> bool:
        """Tell whether the rest of the body is at hand, so that `receive` gives it at once."""
        ...

    def watch(self, left: Callable[[], None]) -> None:
        """Read on from the client, and call `left` once when it is gone: at once if it is already."""
        ...

    def unwatch(self) -> None:
        """Call nobody any more."""
        ...

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole response, if nothing is in the way of it; tells whether it was. If not, `send` may wait."""
        ...

    def outlet(self) -> Outlet | None:
        """Give where parts of the body of a response can be put that has begun."""
        ...

    def is_behind(self) -> bool:
        """Tell whether the client has still to take much of what was sent."""
        ...

    async def taken(self) -> bool:
        """Wait until it has, and tell so; not if it left before."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """Give the connection of a request, where the server has told it."""
    extensions = scope.get("extensions")
    connection: Connection | None = None if extensions is None else extensions.get(EXTENSION)
    return connection


class UnlessGone:
    """Enter a scope that is cancelled when the client of a connection leaves, if `left` says that it is wanted.

    A class, since every request enters one: a generator, or a coroutine around what is awaited, costs more.
    """

    __slots__ = ("_connection", "_left", "_scope")

    def __init__(self, connection: Connection, left: Callable[[], bool], loop: EventLoop) -> None:
        self._connection = connection
        self._left = left
        self._scope = loop.scope()

    def __enter__(self) -> anyio.CancelScope:
        scope = self._scope.__enter__()
        self._connection.watch(self._gone)
        return scope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._connection.unwatch()
        return self._scope.__exit__(kind, error, trace)

    def _gone(self) -> None:
        if self._left():
            self._scope.cancel()


async def listening(
    answer: Callable[[], Awaitable[object]], left: Callable[[], bool], receive: Receive
) -> None:
    """Await `answer`, and cancel it when the client leaves, if `left` says that it is still wanted.

    Raises what `answer` raises.
    """
    await while_listening(answer, partial(_listen, receive, left))


async def _listen(receive: Receive, left: Callable[[], bool], scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if left():
        scope.cancel()
