"""The workers of a sidecar: started, started again when one dies, and ended together.

Each listens on a socket of its own with one address, among which the kernel spreads connections: it sends none to a
process that is gone, and none to one that does not listen yet. What workers are told is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random

from resilient_llm.core.backoff import Backoff
from resilient_llm.sidecar.listener import bind
from resilient_llm.sidecar.worker_handle import WorkerHandle

__all__ = ["Crew", "StartError"]

logger = logging.getLogger("resilient_llm")

_BACKOFF = Backoff(initial=0.5, maximum=30.0, jitter="none")
_SETTLED = 60.0
"""Seconds after which the death of a worker is the first of its kind."""
_LAST_GRACE = 15.0
"""Seconds after the time to drain in which spans are sent and leases given back."""


class StartError(Exception):
    """A worker that could not begin to serve; why, it has logged."""


class Crew:
    """Keep `count` workers on one address; `first` gives the message that each begins with. Raises `OSError`."""

    def __init__(
        self,
        host: str,
        port: int,
        count: int,
        *,
        drain_timeout: float,
        first: Callable[[], Mapping[str, object]],
    ) -> None:
        bind(host, port).close()  # several may share an address by intention only
        self.socket = bind(host, port, shared=True)
        """Keeps the address, and listens to nothing."""
        self.restarts = dict.fromkeys(range(1, count + 1), 0)
        self._host = host
        self._drain_timeout = drain_timeout
        self._first = first
        self._workers: dict[int, WorkerHandle] = {}
        self._up: set[int] = set()
        self._all_up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def draining(self) -> bool:
        """Tell whether it is about to end."""
        return self._stopping.is_set()

    @property
    def workers(self) -> list[WorkerHandle]:
        """Give the workers that serve now, by their numbers."""
        return [worker for _, worker in sorted(self._workers.items()) if worker.is_ready]

    @property
    def beginners(self) -> list[WorkerHandle]:
        """Give the workers that have been told what to serve, and do not yet."""
        return [worker for worker in self._workers.values() if not worker.is_ready]

    async def start(self) -> None:
        """Start all of them, and wait until they serve. Raises `StartError`."""
        self._keepers = [asyncio.create_task(self._keep(number)) for number in self.restarts]
        up = asyncio.create_task(self._all_up.wait())
        done, _ = await asyncio.wait([up, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        for keeper in done - {up}:
            await keeper

    def stop(self) -> None:
        """Have all drain and end; the second time at once."""
        if self._stopping.is_set():
            self.kill()
            return
        self._stopping.set()
        for worker in self._workers.values():
            worker.terminate()
        asyncio.get_running_loop().call_later(self._drain_timeout + _LAST_GRACE, self.kill)

    def kill(self) -> None:
        """End all at once."""
        for worker in self._workers.values():
            worker.kill()

    async def ended(self) -> None:
        """Wait until all have ended."""
        await asyncio.gather(*self._keepers)

    async def aclose(self) -> None:
        """Leave nothing behind."""
        self._stopping.set()
        self.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self.socket.close()

    async def _keep(self, number: int) -> None:
        """Have a worker of this number, one after the other."""
        loop, failures = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            began = loop.time()
            how = await self._work(number)
            if self._stopping.is_set():
                return
            if number not in self._up:
                raise StartError(f"worker {number} could not start: {how}; the log says why")
            failures = 1 if loop.time() - began > _SETTLED else failures + 1
            pause = _BACKOFF.delay(failures, Random())
            fields = {"worker_ended": number, "how": how, "again_in": pause}
            logger.error("a worker ended, and is started again", extra={"fields": fields})
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                self.restarts[number] += 1

    async def _work(self, number: int) -> str:
        """Start one worker, wait until it is over, and say how it ended."""
        try:
            sock = bind(self._host, self.socket.getsockname()[1], shared=True)
            worker = await WorkerHandle.start(number, sock)
        except OSError as error:
            return f"{error.strerror}"
        self._workers[number] = worker
        await worker.begin(self._first())  # at once: what is changed after this it is told
        if self._stopping.is_set():  # meanwhile
            worker.terminate()
        if await worker.up():
            self._up.add(number)
            if len(self._up) == len(self.restarts):
                self._all_up.set()
            if self.restarts[number]:
                logger.info("a worker is back", extra={"fields": {"worker_back": number, "pid": worker.pid}})
        code = await worker.ended()
        del self._workers[number]
        return f"signal {-code}" if code < 0 else f"exit code {code}"
