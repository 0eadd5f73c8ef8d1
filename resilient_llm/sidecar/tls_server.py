"""A server of TLS connections that are counted from when they are taken, and not only once they are encrypted.

`asyncio.Server` begins a handshake with whoever comes, and tells nobody before it is done. What is said over a
connection, and how many there may be, is the protocol's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import traceback
from collections.abc import Callable

from resilient_llm.sidecar.protocol import LAST_STAGE, GuardedProtocol

__all__ = ["TLSServer"]

logger = logging.getLogger("resilient_llm")

_AT_ONCE = 8
"""Connections that are taken in one turn of the event loop."""

_PAUSE = 1.0
"""Seconds until it is tried again where the system had nothing left for a connection."""

_NOTHING_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TLSServer:
    """Take the connections of a socket that listens, until it is closed, and hand each to a protocol of its own.

    A handshake has `handshake_timeout` seconds; where it is one of too many connections no more than those have who are
    told so, and where there is no room for being told there is none.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], GuardedProtocol],
        *,
        handshake_timeout: float,
    ) -> None:
        sock.settimeout(0)
        self._socket = sock
        self._context = context
        self._protocol = protocol
        self._timeout = handshake_timeout
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._watch()

    def close(self) -> None:
        """Take no more connections; those that there are know by themselves when to end."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    async def wait_closed(self) -> None:
        """Wait for handshakes that are being given up."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _watch(self) -> None:
        self._loop.add_reader(self._socket, self._take_some)

    def _take_some(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NOTHING_LEFT:
                    raise
                logger.error("no connection can be taken: %s", error.strerror)  # noqa: TRY400 - no defect of ours
                self._loop.remove_reader(self._socket)
                self._again = self._loop.call_later(_PAUSE, self._watch)
                return
            self._take(sock, address[:2])

    def _take(self, sock: socket.socket, client: tuple[str, int]) -> None:
        sock.settimeout(0)
        protocol = self._protocol()
        full = protocol.begin_handshake(sock, client)
        if full is not None and full.at_once:
            sock.close()
            return
        timeout = self._timeout if full is None else min(self._timeout, LAST_STAGE)
        task = self._loop.create_task(self._shake_hands(sock, protocol, timeout))
        task.add_done_callback(self._handshakes.discard)
        self._handshakes.add(task)

    async def _shake_hands(self, sock: socket.socket, protocol: GuardedProtocol, patience: float) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=patience,
                ssl_shutdown_timeout=LAST_STAGE,
            )
        except OSError as error:  # of TLS, of the network, or it took too long
            # It is held by what it passed through, and with it 256 KiB of asyncio's.
            traceback.clear_frames(error.__traceback__)
        finally:
            protocol.end_handshake()
