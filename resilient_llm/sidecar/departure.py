"""A client that leaves while it is answered ends what is done for it.

The server of this package says so by itself, which costs a request next to nothing. Under any other a task of its own
listens for it. What a body or an answer is, is not seen here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import anyio
from starlette.types import Receive, Scope

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop

__all__ = ["EXTENSION", "Connection", "connection_of", "unless_gone"]

EXTENSION = "resilient_llm.connection"
"""The name of an ASGI extension: the `Connection` that a request came over."""


class Connection(Protocol):
    """What a server knows of the connection of a request."""

    def has_whole_body(self) -> bool:
        """Tell whether the rest of the body is at hand, so that `receive` gives it at once."""
        ...

    def watch(self, left: Callable[[], None]) -> None:
        """Read on from the client, and call `left` once when it is gone: at once if it is already."""
        ...

    def unwatch(self) -> None:
        """Call nobody any more."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """Give the connection of a request, where the server has told it."""
    extensions = scope.get("extensions")
    connection: Connection | None = None if extensions is None else extensions.get(EXTENSION)
    return connection


async def unless_gone(
    answer: Callable[[], Awaitable[None]],
    left: Callable[[], bool],
    *,
    loop: EventLoop,
    connection: Connection | None,
    receive: Receive,
) -> None:
    """Await `answer`, and cancel it when the client leaves, if `left` says that it is still wanted.

    Raises what `answer` raises.
    """
    if connection is None:
        await _listening(answer, left, receive)
        return
    with loop.scope() as scope:

        def gone() -> None:
            if left():
                scope.cancel()

        connection.watch(gone)
        try:
            await answer()
        finally:
            connection.unwatch()


async def _listening(
    answer: Callable[[], Awaitable[None]], left: Callable[[], bool], receive: Receive
) -> None:
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_listen, receive, left, tasks.cancel_scope)
        try:
            await answer()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:  # noqa: BLE001 - raised again below, outside the group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # or its traceback and this frame would hold each other


async def _listen(receive: Receive, left: Callable[[], bool], scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if left():
        scope.cancel()
