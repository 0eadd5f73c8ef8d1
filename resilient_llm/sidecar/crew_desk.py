"""What operators ask for, done for a sidecar of several workers: each is asked, and the answers made into one.

A reload is all or nothing: what the file says is made into everything here, for nobody to use, before any worker is
told of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from resilient_llm.sidecar.check import notes
from resilient_llm.sidecar.config import located
from resilient_llm.sidecar.desk import JSON, TEXT, Answer, reloaded
from resilient_llm.sidecar.files import aside
from resilient_llm.sidecar.merged import one_health, one_text
from resilient_llm.sidecar.reload import Reloaded, after_restart
from resilient_llm.sidecar.tls import renew
from resilient_llm.sidecar.ui import SNAPSHOT, merge

if TYPE_CHECKING:
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.crew import Crew
    from resilient_llm.sidecar.orders import Orders
    from resilient_llm.sidecar.tls import Certificates
    from resilient_llm.sidecar.worker_handle import WorkerHandle

__all__ = ["CrewDesk"]

logger = logging.getLogger("resilient_llm")

_NOBODY: Answer = (503, TEXT, b"No worker answers.\n")


class CrewDesk:
    """Do what operators ask for of all workers. Satisfies `Desk`."""

    def __init__(self, crew: Crew, orders: Orders, *tls: Certificates | None) -> None:
        self._crew = crew
        self._orders = orders
        self._tls = tls
        self._started_with = orders.config
        self._last = Reloaded()
        self._one_by_one = asyncio.Lock()

    @property
    def not_ready(self) -> str | None:
        """Say why it should get no new requests; `None` where somebody serves who has not fallen silent."""
        if self._crew.draining:
            return "draining"
        return None if any(not worker.is_silent for worker in self._crew.workers) else "no worker serves"

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Answer one request."""
        if (method, path) == ("POST", "/admin/reload"):
            return await reloaded(self.reload)
        if not self._crew.workers:
            return 503, TEXT, b"No worker serves.\n"
        if method == "POST" and (changed := await self._change(path, body)) is not None:
            return changed
        given = _given(await self._ask(method, path))
        if not given:
            return _NOBODY
        worst = max((answer for _, answer in given), key=lambda answer: answer[0])
        return worst if worst[0] != 200 else self._as_one(path, given)

    async def _change(self, path: str, body: bytes) -> Answer | None:
        """Change something by hand in all workers; `None` for a path that is no change's."""
        async with self._one_by_one:
            done = self._orders.change(path, body)  # first: a worker may begin meanwhile
            if done is None or done[0] != 200:
                return done
            asked = await self._ask("POST", path, body.decode("utf-8", "replace"))
            given = [(worker, answer) for worker, answer in _given(asked) if answer[0] == 200]
            self._orders.follow(path, [answer[2] for _, answer in given])
            did = [worker for worker, _ in given]
            self._part_with([worker for worker, _ in asked if worker not in did])
        return given[0][1] if given else _NOBODY

    def _as_one(self, path: str, given: list[tuple[WorkerHandle, Answer]]) -> Answer:
        """Make one answer of those of all workers."""
        if path == "/metrics":
            texts = {worker.number: answer[2].decode() for worker, answer in given}
            return 200, given[0][1][1], one_text(texts, self._crew.restarts).encode()
        if path == "/admin/health":
            return 200, JSON, json.dumps(self._health(given)).encode()
        return given[0][1] if path != SNAPSHOT else self._snapshot(given)

    def _snapshot(self, given: list[tuple[WorkerHandle, Answer]]) -> Answer:
        seen = merge([json.loads(answer[2]) for _, answer in given])
        return 200, JSON, json.dumps({**seen, "reload_error": self._last.error}).encode()

    def _health(self, given: list[tuple[WorkerHandle, Answer]]) -> Mapping[str, object]:
        reports = {worker.number: json.loads(answer[2]) for worker, answer in given}
        pids = {worker.number: worker.pid for worker in self._crew.workers}
        workers = [
            {
                "worker": number,
                "pid": pids.get(number),
                "restarts": restarts,
                "running": reports[number]["running"] if number in reports else None,
            }
            for number, restarts in self._crew.restarts.items()
        ]
        last = self._last
        return {
            **one_health(list(reports.values())),
            "reload": {"count": last.count, "error": last.error, "after_restart": last.after_restart},
            "workers": workers,
        }

    async def reload(self) -> Reloaded:
        """Have all workers go by what the file says now.

        Raises `ConfigError` and `ReloadDefectError`, and all is as it was.
        """
        async with self._one_by_one:
            with self._last.attempt():
                return await self._reload()

    async def _reload(self) -> Reloaded:
        checked = await self._orders.checked()
        show = await aside(partial(self._renew, checked.config))
        self._orders.take(checked)
        show()
        asked = await self._ask("POST", "/admin/reload", checked.text.decode())
        failed = [worker for worker, answer in asked if answer is None or answer[0] != 200]
        self._part_with(failed)
        self._last.error = None
        self._last.count += 1
        self._last.after_restart = after_restart(self._started_with, checked.config)
        fields = {"after_restart": self._last.after_restart, "workers": len(asked) - len(failed)}
        logger.info("the configuration was reloaded", extra={"fields": fields})
        self.warn()
        return self._last

    def _renew(self, config: Config) -> Callable[[], None]:
        with located(self._orders.path):
            return renew(self._tls, config)

    def warn(self) -> None:
        """Say what workers do not share."""
        count = len(self._crew.restarts)
        server = self._orders.config.server.model_copy(update={"workers": count})
        for note in notes(self._orders.config.model_copy(update={"server": server})):
            logger.warning("%s", note)

    def _part_with(self, workers: list[WorkerHandle]) -> None:
        """End workers that did not do what the others did: they come back as the others are."""
        for worker in workers:
            if worker.is_ready:  # else it is gone already
                fields = {"worker_ended": worker.number}
                logger.error("a worker did not do as it was told, and is ended", extra={"fields": fields})
                worker.kill()

    async def _ask(self, method: str, path: str, body: str = "") -> list[tuple[WorkerHandle, Answer | None]]:
        """Ask all that serve now; who is gone, or hangs, has no answer."""
        workers = self._crew.workers
        if method == "POST":
            for beginner in self._crew.beginners:
                await beginner.tell(method, path, body)
        answers = await asyncio.gather(*[worker.ask(method, path, body) for worker in workers])
        return list(zip(workers, answers, strict=True))


def _given(asked: list[tuple[WorkerHandle, Answer | None]]) -> list[tuple[WorkerHandle, Answer]]:
    return [(worker, answer) for worker, answer in asked if answer is not None]
