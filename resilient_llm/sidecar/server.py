"""The sidecar as one process: its sockets, its signals, and how it ends.

uvicorn carries the bytes. What is answered is the app's; here it is started, told to reload, and drained. Several
processes are the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from resilient_llm.sidecar.access_log import JSONFormatter
from resilient_llm.sidecar.admin import Admin, admin_token
from resilient_llm.sidecar.app import Sidecar
from resilient_llm.sidecar.config import load, located
from resilient_llm.sidecar.desk import OneProcess
from resilient_llm.sidecar.engine import Engine
from resilient_llm.sidecar.exchange import CutShortError
from resilient_llm.sidecar.listener import Listener, admin_listener, bind, main_listener
from resilient_llm.sidecar.log_lines import LineHandler
from resilient_llm.sidecar.log_writer import LogWriter
from resilient_llm.sidecar.observability import observe
from resilient_llm.sidecar.problems import ConfigError
from resilient_llm.sidecar.reload import ReloadDefectError, Reloader
from resilient_llm.sidecar.service import Service, signals
from resilient_llm.sidecar.tls import LISTENERS, Certificates
from resilient_llm.sidecar.whole_lines import WholeLines

__all__ = ["Ready", "configure_logging", "run"]

logger = logging.getLogger("resilient_llm")

_LOST = "lines of the log were left out, since what reads them was too slow"

Ready = Callable[[str, str | None], None]
"""Is told the URLs of the sidecar and of its admin listener."""


async def run(path: Path, *, engine: Engine | None = None, ready: Ready | None = None) -> None:
    """Serve what the configuration in a file says until SIGTERM or SIGINT; reload it at SIGHUP.

    Raises `ConfigError`, and `OSError` for an address that cannot be had.
    """
    from resilient_llm.transports.http1 import Http1Transport  # noqa: PLC0415 - a supervisor has no use for it

    with located(path):
        config = load(path)
        token = admin_token(config.admin.token_env)
        tls, admin_tls = (Certificates.of(listener, config, path) for listener in LISTENERS)
        seen = observe(config)
    try:
        with located(path):
            sidecar = Sidecar(config, engine or Http1Transport(), telemetry=seen.telemetry)
        reload = Reloader(sidecar, path, tls, admin_tls, seen=seen)
        admin = Admin(OneProcess(sidecar, reload, metrics=seen.metrics), token=token)
        with contextlib.ExitStack() as sockets:
            sock = sockets.enter_context(bind(config.server.host, config.server.port))
            main = main_listener(sidecar, config, sock, tls)
            others: list[Listener] = []
            if config.admin.enabled:
                sock = sockets.enter_context(bind(config.admin.host, config.admin.port))
                others.append(admin_listener(admin, sock, admin_tls))
            await _serve(Service(sidecar, main, *others), reload, main, others, ready)
    finally:
        seen.shutdown()


async def _serve(
    service: Service, reload: Reloader, main: Listener, others: list[Listener], ready: Ready | None
) -> None:
    reloads: set[asyncio.Task[None]] = set()

    def hang_up() -> None:
        task = asyncio.get_running_loop().create_task(_reload(reload))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    with signals({signal.SIGTERM: service.stop, signal.SIGINT: service.stop, signal.SIGHUP: hang_up}):
        await service.start()
        admin_url = others[0].url if others else None
        logger.info("listening", extra={"fields": {"url": main.url, "admin_url": admin_url}})
        if ready is not None:
            ready(main.url, admin_url)
        await service.ended()


async def _reload(reload: Reloader) -> None:
    with contextlib.suppress(ConfigError, ReloadDefectError):  # which is logged, and in the health report
        await reload()


def configure_logging(*, level: int = logging.INFO, worker: int | None = None) -> None:
    """Write everything that is logged to standard output, one JSON object a line; by a `worker` with its number."""
    # What a record has for other formats, and nobody writes: `logging` documents how to go without.
    for switch in ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks"):
        setattr(logging, switch, False)
    logging._srcfile = None
    formatter = JSONFormatter()

    def lost(count: int) -> str:
        fields = {"lines": count} if worker is None else {"lines": count, "worker": worker}
        record = logging.LogRecord("resilient_llm", logging.WARNING, "", 0, _LOST, None, None)
        record.fields = fields
        return formatter.format(record) + "\n"

    handler = LineHandler(LogWriter(WholeLines(sys.stdout.fileno()), lost=lost))
    handler.setFormatter(formatter)
    if worker is not None:

        def numbered(record: logging.LogRecord) -> bool:
            record.fields = {**getattr(record, "fields", {}), "worker": worker}
            return True

        handler.addFilter(numbered)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("resilient_llm").setLevel(level)
    logging.getLogger("uvicorn.error").addFilter(_worth_saying)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Keep uvicorn from reporting as defects what the access log has: replies cut short, by draining too."""
    return record.exc_info is None or record.exc_info[0] not in (CutShortError, asyncio.CancelledError)
