"""The sidecar as a process: its sockets, its signals, and how it ends.

uvicorn carries the bytes. What is answered is the app's; here it is started, told to reload, and drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from resilient_llm.sidecar.access_log import JSONFormatter
from resilient_llm.sidecar.admin import Admin, admin_token
from resilient_llm.sidecar.app import Sidecar
from resilient_llm.sidecar.config import Config, load, located
from resilient_llm.sidecar.engine import Engine
from resilient_llm.sidecar.exchange import CutShortError
from resilient_llm.sidecar.observability import observe
from resilient_llm.sidecar.problems import ConfigError
from resilient_llm.sidecar.protocol import guarded
from resilient_llm.sidecar.reload import Reloader
from resilient_llm.transports.aiohttp import AiohttpTransport

__all__ = ["configure_logging", "run"]

logger = logging.getLogger("resilient_llm")


async def run(
    path: Path, *, engine: Engine | None = None, ready: Callable[[str, str | None], None] | None = None
) -> None:
    """Serve what the configuration in a file says until SIGTERM or SIGINT; reload it at SIGHUP.

    `ready` is told the URLs of the sidecar and its admin listener. Raises `ConfigError`, and `OSError` for an address
    that cannot be had.
    """
    with located(path):
        config = load(path)
        token = admin_token(config.admin.token_env)
    seen = observe(config)
    try:
        with located(path):
            sidecar = Sidecar(config, engine or AiohttpTransport(), telemetry=seen.telemetry)
        reload = Reloader(sidecar, path)
        admin = Admin(sidecar, reload, metrics=seen.metrics, token=token)
        with contextlib.ExitStack() as sockets:
            listeners = [_listener(sidecar, config, sockets)]
            if config.admin.enabled:
                listeners.append(_admin_listener(admin, config, sockets))
            await _serve(sidecar, reload, listeners, ready)
    finally:
        seen.shutdown()


async def _serve(
    sidecar: Sidecar,
    reload: Reloader,
    listeners: list[_Listener],
    ready: Callable[[str, str | None], None] | None,
) -> None:
    main, *others = listeners
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def stop() -> None:
        if stopping.is_set():
            main.force_exit = True  # a second time means now
        sidecar.draining = True
        stopping.set()

    def hang_up() -> None:
        task = loop.create_task(_reload(reload))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: hang_up}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        running = [loop.create_task(listener.serve([listener.socket])) for listener in listeners]
        for listener in listeners:
            await listener.is_ready.wait()
        urls = [listener.url for listener in listeners]
        logger.info("listening", extra={"fields": {"url": urls[0], "admin_url": urls[1] if others else None}})
        if ready is not None:
            ready(urls[0], urls[1] if others else None)
        waiting = loop.create_task(stopping.wait())
        await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        logger.info("draining", extra={"fields": {"running": sidecar.setup.running}})
        main.should_exit = True
        await running[0]
        for other in others:  # probes and metrics are answered to the last
            other.should_exit = True
        await asyncio.gather(*running)
        logger.info("stopped")
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
        for listener in listeners:
            listener.should_exit = True


async def _reload(reload: Reloader) -> None:
    with contextlib.suppress(ConfigError):  # which is logged
        await reload()


class _Listener(uvicorn.Server):
    """A uvicorn server on a socket of its own, which leaves signals alone."""

    def __init__(self, config: uvicorn.Config, sock: socket.socket) -> None:
        super().__init__(config)
        self.socket = sock
        self.is_ready = asyncio.Event()
        host, port = sock.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        try:
            await super().startup(sockets)
        finally:
            self.is_ready.set()


def _listener(app: ASGIApp, config: Config, sockets: contextlib.ExitStack) -> _Listener:
    options = config.server
    settings = _settings(app, options.max_head, options.head_timeout)
    settings.limit_concurrency = options.max_connections
    settings.timeout_graceful_shutdown = max(1, round(options.drain_timeout))
    return _Listener(settings, sockets.enter_context(_bind(options.host, options.port)))


def _admin_listener(app: ASGIApp, config: Config, sockets: contextlib.ExitStack) -> _Listener:
    settings = _settings(app, 16 * 1024, 10.0)
    settings.timeout_graceful_shutdown = 1
    return _Listener(settings, sockets.enter_context(_bind(config.admin.host, config.admin.port)))


def _settings(app: ASGIApp, max_head: int, head_timeout: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=guarded(max_head=max_head, head_timeout=head_timeout),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,  # a provider's date is passed on
        proxy_headers=False,
        timeout_keep_alive=75,
        backlog=2048,
    )


@contextlib.contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named so that asyncio sets TCP_NODELAY.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        yield sock
    finally:
        sock.close()


def configure_logging(*, level: int = logging.INFO) -> None:
    """Write everything that is logged to standard output, one JSON object a line."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JSONFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("resilient_llm").setLevel(level)
    logging.getLogger("uvicorn.error").addFilter(_worth_saying)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Keep uvicorn from reporting as a defect a reply that broke off, which the access log has already."""
    return record.exc_info is None or record.exc_info[0] is not CutShortError
