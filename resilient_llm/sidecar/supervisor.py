"""A sidecar of several processes: the one that starts the others, and that operators and the system talk to.

It carries no request. Signals come here, the admin listener is here, and workers are kept alive from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from resilient_llm.sidecar.admin import Admin, admin_token
from resilient_llm.sidecar.config import located
from resilient_llm.sidecar.crew import Crew, StartError
from resilient_llm.sidecar.crew_desk import CrewDesk
from resilient_llm.sidecar.listener import Listener, admin_listener, bind, url_of
from resilient_llm.sidecar.orders import Orders
from resilient_llm.sidecar.problems import ConfigError
from resilient_llm.sidecar.reload import ReloadDefectError
from resilient_llm.sidecar.server import Ready
from resilient_llm.sidecar.service import signals
from resilient_llm.sidecar.tls import Certificates

__all__ = ["StartError", "supervise"]

logger = logging.getLogger("resilient_llm")


async def supervise(path: Path, workers: int, *, ready: Ready | None = None) -> None:
    """Serve what the configuration in a file says with so many processes, until SIGTERM or SIGINT; on Linux.

    SIGHUP reloads it in all of them, or in none. A worker that dies is started again; a second SIGTERM kills them.
    Raises `ConfigError`, `OSError` for an address that cannot be had, and `StartError`.
    """
    orders = Orders(path)
    options = orders.config
    with located(path):
        token = admin_token(options.admin.token_env)
        tls = Certificates.of("admin", options, path)
    server = options.server
    crew = Crew(server.host, server.port, workers, drain_timeout=server.drain_timeout, first=orders.first)
    desk = CrewDesk(crew, orders, tls)
    reloads: set[asyncio.Task[None]] = set()

    def hang_up() -> None:
        task = asyncio.get_running_loop().create_task(_reload(desk))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    admin: Listener | None = None
    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(crew.aclose)
        if options.admin.enabled:
            sock = closing.enter_context(bind(options.admin.host, options.admin.port))
            admin = admin_listener(Admin(desk, token=token), sock, tls)
            admin.listen()  # at once: if another has the address, no worker need start
        closing.enter_context(
            signals({signal.SIGTERM: crew.stop, signal.SIGINT: crew.stop, signal.SIGHUP: hang_up})
        )
        await crew.start()
        if crew.draining:  # meanwhile
            await crew.ended()
            return
        if admin is not None:
            serving = asyncio.create_task(admin.take_connections())
            await admin.is_ready.wait()
        url = url_of(crew.socket, secure=server.tls is not None)
        admin_url = None if admin is None else admin.url
        fields = {"url": url, "admin_url": admin_url, "workers": workers}
        logger.info("listening", extra={"fields": fields})
        desk.warn()
        if ready is not None:
            ready(url, admin_url)
        await crew.ended()
        if admin is not None:  # probes and metrics are answered to the last
            admin.should_exit = True
            await serving
        logger.info("stopped")


async def _reload(desk: CrewDesk) -> None:
    with contextlib.suppress(ConfigError, ReloadDefectError):  # which is logged, and in the health report
        await desk.reload()
