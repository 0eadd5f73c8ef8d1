"""How an ASGI app breaks the connection under it, which ASGI itself has no message for."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Literal, Protocol

from starlette.types import Receive, Scope, Send

CONNECTION_EXTENSION = "resilient_llm.connection"
"""The ASGI extension, and message type, by which a server offers to break a connection: `how` is "reset" or
"close". The in-memory transports speak it."""


class _SocketTransport(Protocol):
    """What asyncio's and uvloop's transports have in common, for what is needed here."""

    def abort(self) -> None: ...
    def close(self) -> None: ...
    def get_extra_info(self, name: str) -> socket.socket | None: ...


async def break_connection(
    scope: Scope, receive: Receive, send: Send, how: Literal["reset", "close"]
) -> None:
    """Break the connection: "reset" at once (TCP RST), or "close" it after what was sent, with no proper end.

    Return when the server has noticed, so that it has nothing to complain of. On uvicorn the socket
    is reached through the `send` it hands out. Where neither that nor the extension is there
    (another server, a middleware in between), raise ConnectionResetError, which servers answer with
    a closed connection or a 500, and log.
    """
    if CONNECTION_EXTENSION in (scope.get("extensions") or {}):
        await send({"type": CONNECTION_EXTENSION, "how": how})
        return
    transport: _SocketTransport | None = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None or not hasattr(transport, "abort"):
        raise ConnectionResetError("the fake provider breaks this connection")
    if how == "reset":
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):  # a client that has left has closed it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()
    while (await receive())["type"] != "http.disconnect":
        pass
