"""What becomes of workers that do not do as they are told, without any process: some answer, some hang, some begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.admin import Admin
from resilient_llm.sidecar.crew_desk import CrewDesk
from resilient_llm.sidecar.desk import JSON, Answer, OneProcess
from resilient_llm.sidecar.orders import Checked, Orders
from resilient_llm.sidecar.supervisor import _reload
from resilient_llm.testing import FakeProvider
from tests.asgi.server import Connection
from tests.sidecar.support import MemoryEngine

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

TOML = "[targets.a]\nurl = 'http://127.0.0.1:9/v1'\n"
DONE: Answer = (200, JSON, b"{}")


class FakeWorker:
    """A worker that answers what it is made with, and notes what it is told."""

    def __init__(self, number: int, answer: Answer | None = DONE, *, is_ready: bool = True) -> None:
        self.number = number
        self.answer = answer
        self.is_ready = is_ready
        self.is_silent = False
        self.pid = 1000 + number
        self.killed = False
        self.heard: list[str] = []
        self.while_asked: Callable[[], None] | None = None

    async def ask(self, _method: str, path: str, _body: str = "") -> Answer | None:
        self.heard.append(path)
        if self.while_asked is not None:
            self.while_asked()
        return self.answer

    async def tell(self, _method: str, path: str, _body: str) -> None:
        self.heard.append(path)

    def kill(self) -> None:
        self.killed = True


class FakeCrew:
    """The workers there are."""

    draining = False

    def __init__(self, *workers: FakeWorker) -> None:
        self.all = workers
        self.restarts = {worker.number: 0 for worker in workers}

    @property
    def workers(self) -> list[FakeWorker]:
        return [worker for worker in self.all if worker.is_ready]

    @property
    def beginners(self) -> list[FakeWorker]:
        return [worker for worker in self.all if not worker.is_ready]


def desk_of(tmp_path: Path, *workers: FakeWorker) -> CrewDesk:
    file = tmp_path / "gateway.toml"
    file.write_text(TOML)
    crew: Any = FakeCrew(*workers)
    return CrewDesk(crew, Orders(file))


async def test_a_defect_is_told_to_no_worker_and_to_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_orders: Orders) -> Checked:
        raise LookupError

    monkeypatch.setattr(Orders, "checked", broken)
    monkeypatch.setattr("resilient_llm.sidecar.crew_desk.one_health", lambda _reports: {})
    worker = FakeWorker(1, (200, JSON, b'{"running": 0}'))
    desk = desk_of(tmp_path, worker)
    await _reload(desk)  # as SIGHUP does
    status, _, body = await desk.answer("POST", "/admin/reload", b"")
    assert (status, json.loads(body)["reloaded"]) == (500, False)
    assert worker.heard == []
    _, _, body = await desk.answer("GET", "/admin/health", b"")
    assert json.loads(body)["reload"]["error"] == "it met a defect, LookupError; the log says where"


@pytest.mark.parametrize("path", ["/admin/reload", "/admin/circuits/a/isolate"])
async def test_who_hangs_is_ended_and_comes_back_as_the_others_are(path: str, tmp_path: Path) -> None:
    good, hanging = FakeWorker(1), FakeWorker(2, None)
    status, _, _ = await desk_of(tmp_path, good, hanging).answer("POST", path, b"")
    assert status == 200
    assert (good.killed, hanging.killed) == (False, True)


async def test_who_hangs_is_left_alone_by_those_who_only_look(tmp_path: Path) -> None:
    health: Answer = (200, JSON, json.dumps({"config": {}}).encode())
    hanging = FakeWorker(2, None)
    status, _, _ = await desk_of(tmp_path, FakeWorker(1, health), hanging).answer("GET", "/admin/config", b"")
    assert status == 200
    assert not hanging.killed


async def test_what_cannot_be_done_nobody_is_asked_for(tmp_path: Path) -> None:
    worker, beginner = FakeWorker(1), FakeWorker(2, is_ready=False)
    desk = desk_of(tmp_path, worker, beginner)
    for path, expected in (("targets/a/weight", 400), ("circuits/b/isolate", 404), ("canary/c", 404)):
        status, _, _ = await desk.answer("POST", f"/admin/{path}", b"")
        assert status == expected
    assert (worker.heard, beginner.heard) == ([], [])


@pytest.mark.parametrize("path", ["/admin/reload", "/admin/circuits/a/isolate"])
async def test_who_refuses_what_can_be_done_is_ended(path: str, tmp_path: Path) -> None:
    refusing = FakeWorker(2, (422, JSON, b"{}"))
    status, _, _ = await desk_of(tmp_path, FakeWorker(1), refusing).answer("POST", path, b"")
    assert (status, refusing.killed) == (200, True)


async def test_it_is_ready_while_somebody_serves_and_is_not_silent(tmp_path: Path) -> None:
    first, second = FakeWorker(1), FakeWorker(2)
    desk = desk_of(tmp_path, first, second)
    admin = Admin(desk)

    async def ready() -> tuple[int | None, str]:
        answered = await Connection(b"", method="GET", path="/readyz", headers=[]).run(admin)
        return answered.status, answered.body.decode()

    assert await ready() == (200, "ok\n")
    first.is_silent, second.is_ready = True, False
    assert await ready() == (503, "no worker serves\n")
    first.is_silent = False
    assert await ready() == (200, "ok\n")
    first.is_ready = False
    assert await ready() == (503, "no worker serves\n")
    desk._crew.draining = True  # type: ignore[misc]
    assert await ready() == (503, "draining\n")


async def test_who_hangs_is_seen_with_its_process(tmp_path: Path) -> None:
    sidecar = Sidecar(parse(TOML), MemoryEngine(FakeProvider()))
    health = await OneProcess(sidecar, None).answer("GET", "/admin/health", b"")
    desk = desk_of(tmp_path, FakeWorker(1, health), FakeWorker(2, None), FakeWorker(3, is_ready=False))
    _, _, body = await desk.answer("GET", "/admin/health", b"")
    assert [(one["worker"], one["pid"], one["running"]) for one in json.loads(body)["workers"]] == [
        (1, 1001, 0),
        (2, 1002, None),
        (3, None, None),
    ]


async def test_who_begins_to_serve_meanwhile_is_told_and_stays(tmp_path: Path) -> None:
    beginner = FakeWorker(2, is_ready=False)
    serving = FakeWorker(1)
    serving.while_asked = lambda: setattr(beginner, "is_ready", True)
    await desk_of(tmp_path, serving, beginner).reload()
    assert beginner.is_ready
    assert beginner.heard == ["/admin/reload"]
    assert not beginner.killed
