"""One of the processes of a sidecar that has several: it serves the port they share, and does what its supervisor says.

Made by the supervisor, with a socket to listen on and a channel, over which the configuration comes. It outlives
nobody: without its supervisor it drains and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from resilient_llm.sidecar.app import Sidecar
from resilient_llm.sidecar.channel import Channel
from resilient_llm.sidecar.config import parse
from resilient_llm.sidecar.desk import Answer, OneProcess
from resilient_llm.sidecar.event_loop import run
from resilient_llm.sidecar.handed_on import give
from resilient_llm.sidecar.listener import main_listener
from resilient_llm.sidecar.observability import observe
from resilient_llm.sidecar.problems import ConfigError
from resilient_llm.sidecar.reload import ReloadDefectError, Reloader, in_force
from resilient_llm.sidecar.server import configure_logging
from resilient_llm.sidecar.service import Service, signals
from resilient_llm.sidecar.tls import Certificates
from resilient_llm.transports.http1 import Http1Transport

__all__ = ["done", "main"]

logger = logging.getLogger("resilient_llm")


async def work(channel: Channel, sock: socket.socket) -> None:
    """Serve on a socket until told to stop, by the configuration that comes first over the channel."""
    first = await channel.receive()
    if first is None:
        return
    path = Path(first["path"])
    # One that begins later listens as the others do, whatever the file says of it meanwhile.
    config = in_force(parse(first["started"]), parse(first["text"], file=str(path)))
    tls = Certificates.of_kept("server", first["tls"], path)
    seen = observe(config)
    try:
        sidecar = Sidecar(config, Http1Transport(), telemetry=seen.telemetry)
        reload = Reloader(sidecar, path, tls, seen=seen)
        desk = OneProcess(sidecar, reload, metrics=seen.metrics)
        service = Service(sidecar, main_listener(sidecar, config, sock, tls))
        # Who stops it tells the supervisor, who tells everybody: a terminal and a service manager tell all processes.
        with signals({signal.SIGTERM: service.drain, signal.SIGINT: _leave, signal.SIGHUP: _leave}):
            give(sidecar.setup, first["by_hand"])
            await service.start()
            await channel.send({"ready": os.getpid()})
            listening = asyncio.create_task(_listen(channel, desk, reload, service))
            await service.ended()
            listening.cancel()
    finally:
        seen.shutdown()


def _leave() -> None:
    """Leave a signal to the supervisor."""


async def _listen(channel: Channel, desk: OneProcess, reload: Reloader, service: Service) -> None:
    """Do what the supervisor asks for, and drain when it is gone."""
    doing: set[asyncio.Task[None]] = set()
    while (asked := await channel.receive()) is not None:
        task = asyncio.create_task(_answer(channel, asked, desk, reload))
        doing.add(task)
        task.add_done_callback(doing.discard)
    logger.warning("the supervisor is gone")
    service.drain()


async def _answer(channel: Channel, asked: dict[str, Any], desk: OneProcess, reload: Reloader) -> None:
    try:
        answer = await done(asked, desk, reload)
    except Exception:
        logger.exception("an admin request met a defect")
        answer = (500, [], b"Something broke.\n")
    status, headers, body = answer
    shown = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    await channel.send(
        {"id": asked["id"], "status": status, "headers": shown, "body": body.decode("utf-8", "replace")}
    )


async def done(asked: dict[str, Any], desk: OneProcess, reload: Reloader) -> Answer:
    """Do what is asked for; what to go by after a reload the supervisor says, which has read the file."""
    if (asked["method"], asked["path"]) != ("POST", "/admin/reload"):
        return await desk.answer(asked["method"], asked["path"], asked["body"].encode())
    try:
        await reload(asked["body"].encode())
    except ConfigError as error:
        return 422, [], str(error).encode()
    except ReloadDefectError as error:
        return 500, [], str(error).encode()
    return 200, [], b""


def main(arguments: list[str] | None = None) -> int:
    """Run a worker; its number and its sockets are what the supervisor says."""
    parser = argparse.ArgumentParser(prog="resilient_llm.sidecar.worker")
    for name in ("--number", "--listen", "--channel"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args(arguments)
    configure_logging(worker=given.number)
    # Until it listens, what stops it is the end of the channel.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        with socket.socket(fileno=given.listen) as sock:
            run(_run(socket.socket(fileno=given.channel), sock))
    except ConfigError as error:
        logger.error("cannot start: %s", error)  # noqa: TRY400 - it is the user's
        return 1
    return 0


async def _run(pair: socket.socket, sock: socket.socket) -> None:
    channel = await Channel.over(pair)
    try:
        await work(channel, sock)
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
