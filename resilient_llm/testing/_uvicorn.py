"""uvicorn, started and stopped within a test. Only `_server` imports this, on use: uvicorn is an extra."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

_KEEP_ALIVE = 3600
"""Seconds for which an idle connection stays open: a client that was held up may use it just as it is closed."""


class LoopbackServer(uvicorn.Server):
    """A uvicorn server on a socket of its own that tells when it is ready and leaves signals alone.

    It is stopped by `should_exit` and gives open responses one second to end.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, on_ready: Callable[[], object]) -> None:
        # log_config=None: a test's logging is the test's own to configure.
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # The protocol is named so that asyncio sets TCP_NODELAY: without it each response waits 40 ms for an ACK.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self._on_ready = on_ready
        name = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{name}:{self._socket.getsockname()[1]}"

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Leave signals to the test runner."""
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then report; an app that fails to start is an error here, not the end of the process."""
        try:
            await super().startup(sockets)
        except SystemExit:
            raise RuntimeError("the app failed to start; the logger uvicorn.error says why") from None
        finally:
            self._on_ready()

    async def run_to_end(self) -> None:
        """Serve until told to stop."""
        try:
            await self.serve(sockets=[self._socket])
        finally:
            self._socket.close()


def run(app: ASGIApp, host: str, port: int) -> None:
    """Serve as a program does, until a signal."""
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_keep_alive=_KEEP_ALIVE)
