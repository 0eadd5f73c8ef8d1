"""uvicorn's protocol, counted from when its connection is taken: a TLS handshake needs room, too.

What those who find none are told, and what may come from the others, is looked at elsewhere.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import ClassVar, NamedTuple

from resilient_llm.sidecar.rejection import TOO_MANY
from resilient_llm.sidecar.watched import WatchedProtocol

__all__ = ["AT_THE_DOOR", "CountedProtocol", "Overflow"]

AT_THE_DOOR = 16
"""Connections beyond those that are allowed whose clients may take their time. More than that are closed at once."""


class Overflow(NamedTuple):
    """Why there is no room for a connection, and whether it has to be closed at once."""

    why: str
    at_once: bool


class CountedProtocol(WatchedProtocol):
    """Know when there is no room: with more than `max_connections`, and for a descriptor above `max_descriptor`.

    Of descriptors the lowest is given that is free, so that all below are in use.
    """

    max_connections: ClassVar[int | None] = None
    max_descriptor: ClassVar[int | None] = None

    _handshake: socket.socket | None = None
    """What a TLS handshake goes on over."""

    @classmethod
    def overflow(cls, count: int, sock: socket.socket | None) -> Overflow | None:
        """Say why there is no room for the last of `count` connections, over a socket; `None` where there is."""
        if cls.max_descriptor is not None and sock is not None and sock.fileno() > cls.max_descriptor:
            return Overflow("next to no files are left that the process may open (ulimit -n)", at_once=True)
        if cls.max_connections is not None and count > cls.max_connections:
            most = cls.max_connections
            return Overflow(f"{most} connections are open", at_once=count > most + AT_THE_DOOR)
        return None

    def begin_handshake(self, sock: socket.socket, client: tuple[str, int]) -> Overflow | None:
        """Be a connection from now on, if only until `end_handshake`; gives why there is no room for it.

        One that has to be closed at once is none, and its client is told nothing.
        """
        full = self.overflow(len(self.connections) + 1, sock)
        if full is not None and full.at_once:
            self.client = client
            self._warn(f"{TOO_MANY.phrase}, {full.why}")
            self.connection_lost(ConnectionAbortedError(full.why))
        else:
            self._handshake = sock
            self.connections.add(self)
        return full

    def end_handshake(self) -> None:
        """Be no connection any more if none came of it."""
        self._handshake = None
        if self.transport is None:
            self.connection_lost(ConnectionAbortedError("no TLS"))

    def shutdown(self) -> None:
        """End the connection, if nothing is being answered over it."""
        if self.transport is None:
            if self._handshake is not None:
                with suppress(OSError):  # the client was faster
                    self._handshake.shutdown(socket.SHUT_RDWR)
        elif self.cycle is None or self.cycle.response_complete:
            self.finish()
        else:
            self.cycle.keep_alive = False

    def _warn(self, what: str) -> None:
        """Log what has nothing of a request in it, and who it is about."""
        client = None if self.client is None else "{}:{}".format(*self.client)
        self.logger.warning("%s", what, extra={"fields": {"client": client}})
