"""A worker as its supervisor knows it: the process, what it is asked, and what it answers.

When one is made anew, and what all of them are told, is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping
from itertools import count

import anyio

from resilient_llm.sidecar.channel import Channel
from resilient_llm.sidecar.desk import Answer

__all__ = ["WorkerHandle"]

logger = logging.getLogger("resilient_llm")

_PATIENCE = 5.0
"""Seconds for an answer; who is silent for so long hangs. Prometheus waits for 10."""

_PATIENCE_FOR_CHANGE = 10.0
"""Seconds for a change by hand; who is silent for so long is ended."""

_PATIENCE_FOR_RELOAD = 30.0


class WorkerHandle:
    """Hold one worker."""

    def __init__(self, number: int, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.number = number
        self.is_ready = False
        self.is_silent = False
        """Whether it did not answer the last time, and has not been heard of since."""
        self._process = process
        self._channel = channel
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Answer | None]] = {}
        self._up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, number: int, sock: socket.socket) -> WorkerHandle:
        """Start a process that is to serve on a socket, which is its own from then on. Raises `OSError`."""
        mine, its = socket.socketpair()
        try:
            with sock, its:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "resilient_llm.sidecar.worker", "--number", str(number)),
                    *("--listen", str(sock.fileno()), "--channel", str(its.fileno())),
                    pass_fds=(sock.fileno(), its.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=_environment(),
                )
            channel = await Channel.over(mine)
        except BaseException:
            mine.close()
            raise
        return cls(number, process, channel)

    @property
    def pid(self) -> int:
        """Give the number of its process."""
        return self._process.pid

    async def up(self) -> bool:
        """Wait until it serves, and tell whether it came to that."""
        return await self._up

    async def begin(self, first: Mapping[str, object]) -> None:
        """Tell it what to serve. What it is told from now on it hears afterwards."""
        await self._channel.send(first)

    async def tell(self, method: str, path: str, body: str) -> None:
        """Have it do something as soon as it serves, and do not wait for that."""
        await self._channel.send({"id": 0, "method": method, "path": path, "body": body})

    async def ask(self, method: str, path: str, body: str = "") -> Answer | None:
        """Give its answer; `None` when it is gone, or hangs."""
        if self._reading.done():
            return None
        number = next(self._numbers)
        answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            async with asyncio.timeout(_patience(method, path)):
                await self._channel.send({"id": number, "method": method, "path": path, "body": body})
                return await answer
        except TimeoutError:
            self._note(is_silent=True)
            return None
        finally:
            del self._asked[number]

    async def ended(self) -> int:
        """Wait until its process is over, and give its exit code."""
        code = await self._process.wait()
        await self._reading
        if self._watching is not None:
            self._watching.cancel()
        self._channel.close()
        return code

    def terminate(self) -> None:
        """Have it drain and end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _note(self, *, is_silent: bool) -> None:
        """Note whether it answers, and say so when that is new."""
        if is_silent is self.is_silent:
            return
        self.is_silent = is_silent
        if is_silent:
            fields = {"worker_silent": self.number, "pid": self.pid}
            logger.error("a worker does not answer", extra={"fields": fields})
        else:
            fields = {"worker_back": self.number, "pid": self.pid}
            logger.warning("a worker answers again", extra={"fields": fields})

    async def _watch(self) -> None:
        """Ask it something now and then, so that it is noticed when it falls silent."""
        while True:
            await anyio.sleep(_PATIENCE)
            await self.ask("GET", "/healthz")

    async def _read(self) -> None:
        while (message := await self._channel.receive()) is not None:
            self._note(is_silent=False)
            if "ready" in message:
                self.is_ready = True
                self._up.set_result(True)
                self._watching = asyncio.create_task(self._watch())
                continue
            asked = self._asked.get(message["id"])  # none where it was only told
            if asked is not None and not asked.done():
                headers = [
                    (name.encode("latin-1"), value.encode("latin-1")) for name, value in message["headers"]
                ]
                asked.set_result((message["status"], headers, message["body"].encode()))
        self.is_ready = False
        if not self._up.done():
            self._up.set_result(False)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)


def _patience(method: str, path: str) -> float:
    if method != "POST":
        return _PATIENCE
    return _PATIENCE_FOR_RELOAD if path == "/admin/reload" else _PATIENCE_FOR_CHANGE


def _environment() -> dict[str, str]:
    """Give the environment of a process that imports from where this one did, and not from wherever it stands."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
