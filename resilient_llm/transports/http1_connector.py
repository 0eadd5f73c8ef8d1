"""Connect to a server: its addresses, a socket to the first that answers, TLS.

What goes over a connection is known elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl as tls
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import aiohappyeyeballs

from resilient_llm.transports.failures import ConnectError, ConnectTimeoutError
from resilient_llm.transports.http1_connection import Connection
from resilient_llm.transports.open_files import is_lack_of_files, limit_of_files

__all__ = ["Connector"]

logger = logging.getLogger("resilient_llm")

_HEAD_START = 0.25
"""Seconds until the next address is tried as well (RFC 8305, 5)."""

_REMEMBERED = 10.0
"""Seconds for which the addresses of a host are remembered: not every connection of a burst has to ask."""

_MAX_HOSTS = 1024

_QUIET = 60.0
"""Seconds in which it is said once that there are no descriptors: calls fail by the thousand then."""

Addresses: TypeAlias = "Sequence[aiohappyeyeballs.AddrInfoType]"


class Connector:
    """Connect in at most `timeout` seconds, addresses and TLS included.

    Addresses are raced here ("happy eyeballs"), since uvloop's `create_connection` tries one after another. Without
    `ssl`, certificates are verified against the system's.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, ssl: tls.SSLContext | None, timeout: float
    ) -> None:
        self._loop = loop
        self._ssl = ssl
        self._timeout = timeout
        self._known: dict[tuple[str, int], tuple[float, Addresses]] = {}
        self._warned = -math.inf

    async def connect(self, connection: Connection) -> None:
        """Connect `connection` to its origin; raises `ConnectError` and `ConnectTimeoutError`.

        Who is cancelled leaves nothing open.
        """
        host, port = connection.origin.host, connection.origin.port
        try:
            async with asyncio.timeout(self._timeout) as limit:
                await self._connect(connection)
        except BaseException as error:
            connection.abort()
            self._known.pop((host, port), None)
            if limit.expired() and isinstance(error, TimeoutError):  # and not who is cancelled as well
                raise ConnectTimeoutError(
                    f"{host}:{port}: no connection after {self._timeout:g} seconds"
                ) from error
            if is_lack_of_files(error):
                self._warn(error)
            # aiohappyeyeballs and names that are none have these beside the system's errors.
            if isinstance(error, OSError | RuntimeError | UnicodeError):
                raise ConnectError(f"{host}:{port}: {error}") from error
            raise

    def _warn(self, error: BaseException) -> None:
        """Tell whoever can mend it, now and then."""
        if self._loop.time() - self._warned < _QUIET:
            return
        self._warned = self._loop.time()
        limit = limit_of_files()
        logger.error(
            "no connection can be opened: %s (ulimit -n is %s); allow more, or let fewer calls in at a time",
            getattr(error, "strerror", error),
            "unlimited" if limit is None else limit,
        )

    async def _connect(self, connection: Connection) -> None:
        origin = connection.origin
        addresses = await self._addresses(origin.host, origin.port)
        sock = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=_HEAD_START, loop=self._loop
        )
        try:
            await self._loop.create_connection(
                lambda: connection,
                sock=sock,
                ssl=(self._ssl or _verifying()) if origin.tls else None,
                server_hostname=origin.host if origin.tls else None,
            )
        except BaseException:
            sock.close()
            raise

    async def _addresses(self, host: str, port: int) -> Addresses:
        now = self._loop.time()
        until, addresses = self._known.get((host, port), (0.0, []))
        if until <= now:
            addresses = await self._loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
            if len(self._known) >= _MAX_HOSTS:
                self._known.clear()
            self._known[host, port] = (now + _REMEMBERED, addresses)
        return addresses


@lru_cache(maxsize=1)
def _verifying() -> tls.SSLContext:
    """Make the context for all, at the first connection that wants it: reading certificates takes a while."""
    context = tls.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
