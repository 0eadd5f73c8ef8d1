"""What operators ask for, done for a sidecar of several workers: each is asked, and the answers made into one.

A reload is all or nothing: what the file says is made into everything here, for nobody to use, before any worker is
told of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from resilient_llm.sidecar.check import built, notes
from resilient_llm.sidecar.config import Config, located, parse
from resilient_llm.sidecar.desk import JSON, TEXT, Answer
from resilient_llm.sidecar.merged import one_health, one_text
from resilient_llm.sidecar.problems import ConfigError
from resilient_llm.sidecar.reload import Reloaded, after_restart, read
from resilient_llm.sidecar.tls import keep, renew
from resilient_llm.sidecar.ui import SNAPSHOT, merge

if TYPE_CHECKING:
    from resilient_llm.sidecar.crew import Crew
    from resilient_llm.sidecar.tls import Certificates, Kept
    from resilient_llm.sidecar.worker_handle import WorkerHandle

__all__ = ["CrewDesk", "Orders"]

logger = logging.getLogger("resilient_llm")


class Orders:
    """Hold what a worker is told when it starts: the configuration, and what was changed by hand since.

    And what its listener shows: that is what the others show, also where their files are broken now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text, self.config, self._tls = self.checked()
        self._started_with = self.config
        self._changes: dict[str, dict[str, str]] = {}

    def checked(self) -> tuple[bytes, Config, Kept | None]:
        """Read the file, and make sure that it would work. Raises `ConfigError`."""
        with located(self.path):
            text = read(self.path)
            config = parse(text, file=str(self.path))
            built(config, self.path, os.environ)
            tls = keep("server", config, self.path)
        return text, config, tls

    def take(self, text: bytes, config: Config, tls: Kept | None) -> None:
        """Go by another configuration; weights that were set by hand end with it."""
        self.text, self.config = text, config
        if "server.tls" not in after_restart(self._started_with, config):
            self._tls = tls
        self._changes = {
            path: change for path, change in self._changes.items() if not path.startswith("/admin/targets/")
        }

    def note(self, path: str, body: str) -> Callable[[], None]:
        """Remember a change by hand, in the place of an earlier one of the same thing; gives what takes that back."""
        of, before = re.sub("/(isolate|close)$", "", path), dict(self._changes)
        self._changes.pop(of, None)
        if not path.endswith("/close"):
            self._changes[of] = {"path": path, "body": body}

        def take_back() -> None:
            self._changes = before

        return take_back

    def first(self) -> Mapping[str, object]:
        """Give the message that a worker begins with."""
        return {
            "path": str(self.path),
            "text": self.text.decode(),
            "tls": self._tls,
            "changes": list(self._changes.values()),
        }


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
    def draining(self) -> bool:
        """Tell whether it is about to stop, or nobody serves."""
        return self._crew.draining or not self._crew.workers

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        """Answer one request."""
        if (method, path) == ("POST", "/admin/reload"):
            return await self._answer_reload()
        if not self._crew.workers:
            return 503, TEXT, b"No worker serves.\n"
        if method == "POST":
            async with self._one_by_one:
                text = body.decode("utf-8", "replace")
                take_back = self._orders.note(path, text)  # first: a worker may begin meanwhile
                asked = await self._ask(method, path, text)
                if any(answer is not None and answer[0] != 200 for _, answer in asked):
                    take_back()
                self._part_with([worker for worker, answer in asked if answer is None])
        else:
            asked = await self._ask(method, path, "")
        given = [(worker, answer) for worker, answer in asked if answer is not None]
        if not given:
            return 503, TEXT, b"No worker answers.\n"
        worst = max((answer for _, answer in given), key=lambda answer: answer[0])
        return worst if method == "POST" or worst[0] != 200 else self._as_one(path, given)

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
        pids = {worker.number: worker.pid for worker, _ in given}
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

    async def _answer_reload(self) -> Answer:
        try:
            done = await self.reload()
        except ConfigError as error:
            return 422, JSON, json.dumps({"reloaded": False, "error": str(error)}).encode()
        return 200, JSON, json.dumps({"reloaded": True, "after_restart": done.after_restart}).encode()

    async def reload(self) -> Reloaded:
        """Have all workers go by what the file says now. Raises `ConfigError`, and all is as it was."""
        async with self._one_by_one:
            try:
                text, config, kept = self._orders.checked()
                with located(self._orders.path):
                    show = renew(self._tls, config)
            except ConfigError as error:
                self._last.error = str(error)
                logger.error("the configuration was not reloaded: %s", error)  # noqa: TRY400 - it is the user's
                raise
            self._orders.take(text, config, kept)
            show()
            asked = await self._ask("POST", "/admin/reload", text.decode())
            failed = [worker for worker, answer in asked if answer is None or answer[0] != 200]
            self._part_with(failed)
        self._last.error = None
        self._last.count += 1
        self._last.after_restart = after_restart(self._started_with, config)
        fields = {"after_restart": self._last.after_restart, "workers": len(asked) - len(failed)}
        logger.info("the configuration was reloaded", extra={"fields": fields})
        self.warn()
        return self._last

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

    async def _ask(self, method: str, path: str, body: str) -> list[tuple[WorkerHandle, Answer | None]]:
        """Ask all that serve now; who is gone, or hangs, has no answer."""
        workers = self._crew.workers
        if method == "POST":
            for beginner in self._crew.beginners:
                await beginner.tell(method, path, body)
        answers = await asyncio.gather(*[worker.ask(method, path, body) for worker in workers])
        return list(zip(workers, answers, strict=True))
