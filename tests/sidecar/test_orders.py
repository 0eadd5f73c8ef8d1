"""A worker that begins later stands as those do that were there all along, whatever was changed by hand meanwhile."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.crew_desk import CrewDesk
from resilient_llm.sidecar.desk import Answer, OneProcess
from resilient_llm.sidecar.handed_on import Standing, give, place, taken
from resilient_llm.sidecar.orders import Orders
from resilient_llm.sidecar.reload import Reloader
from resilient_llm.sidecar.worker import done
from resilient_llm.testing import FakeProvider, run_virtual
from tests.sidecar.support import MemoryEngine, logged

TARGETS = """
[targets.one]
url = "http://one.example/v1"
passthrough = true
[targets.two]
url = "http://two.example/v1"
"""
MODELS = """
[models.base]
targets = ["one/a", "two"]
[models.next]
targets = ["one/b", "two/a"]
[models.untested]
targets = ["one/c"]
"""
CANARY = """
[canary.c1]
model = "base"
candidate = "next"
key = "model"
steps = [0.1, 0.5, 1.0]
"""
WHOLE = TARGETS + MODELS + CANARY
TEXTS = (
    WHOLE,
    WHOLE.replace('candidate = "next"', 'candidate = "untested"'),
    WHOLE.replace("[0.1, 0.5, 1.0]", "[0.2, 0.6]"),
    WHOLE.replace("passthrough = true", "weight = 2"),
    TARGETS.replace("[targets.two]", "[targets.three]"),
    TARGETS + "passthrough = true\n" + MODELS,
    TARGETS + "passthrough = true\n",
    "[targets.one]",  # which cannot work
)
CANARY_ORDERS: tuple[dict[str, object], ...] = (
    {"share": 0.3},
    {"share": 0.5},
    {"share": 0.7},
    {"step": 0},
    {"step": 1},
    {"step": 2},
    {"do": "hold"},
    {"do": "promote"},
    {"do": "roll_back"},
    {"do": "resume"},
    {"do": "nothing"},
)

Step: TypeAlias = tuple[str, Any]

names = st.sampled_from(["one", "two", "three", "one/a", "one/b", "two/a", "none"])
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(
        st.tuples(
            st.just("post"),
            st.one_of(
                st.tuples(names.map("/admin/circuits/{}/isolate".format), st.just(b"")),
                st.tuples(names.map("/admin/circuits/{}/close".format), st.just(b"")),
                st.tuples(
                    names.map("/admin/targets/{}/weight".format),
                    st.sampled_from([b'{"weight": 2}', b'{"weight": 1}', b'{"weight": 0}']),
                ),
                st.tuples(
                    st.just("/admin/canary/c1"),
                    st.sampled_from(CANARY_ORDERS).map(lambda body: json.dumps(body).encode()),
                ),
            ),
        ),
        st.tuples(st.just("reload"), st.sampled_from(TEXTS)),
        st.tuples(st.just("dies"), st.integers(0, 1)),
        st.tuples(st.just("serve"), st.none()),
    ),
    max_size=25,
)


class Worker:
    """A worker without a process: made of the same message, asked the same things."""

    def __init__(self, number: int, orders: Orders) -> None:
        first: dict[str, Any] = json.loads(json.dumps(orders.first()))
        self.number = number
        self.is_ready = self.is_silent = False
        self.told: list[tuple[str, str, str]] = []
        self.sidecar = Sidecar(parse(first["text"]), MemoryEngine(FakeProvider()))
        reload = Reloader(self.sidecar, Path(first["path"]))
        give(self.sidecar.setup, first["by_hand"])
        self._does = OneProcess(self.sidecar, reload), reload

    async def serve(self) -> None:
        self.is_ready = True
        told, self.told = self.told, []
        for one in told:
            await self.ask(*one)

    async def tell(self, method: str, path: str, body: str) -> None:
        self.told.append((method, path, body))

    async def ask(self, method: str, path: str, body: str = "") -> Answer | None:
        return await done({"method": method, "path": path, "body": body}, *self._does)

    def kill(self) -> None:
        raise AssertionError(f"worker {self.number} did not do as it was told")


class Crew:
    """Two of them."""

    draining = False

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.all = [Worker(number, orders) for number in (0, 1)]
        self.restarts = {0: 0, 1: 0}

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in self.all if worker.is_ready]

    @property
    def beginners(self) -> list[Worker]:
        return [worker for worker in self.all if not worker.is_ready]

    async def serve(self) -> None:
        for worker in self.beginners:
            await worker.serve()

    async def restart(self, number: int) -> None:
        self.all[number] = Worker(number, self.orders)
        await self.serve()


def crew_of(file: Path) -> tuple[Crew, CrewDesk]:
    orders = Orders(file)
    crew: Any = Crew(orders)
    return crew, CrewDesk(crew, orders)


async def standing(sidecar: Sidecar) -> dict[str, Any]:
    """Say all that operators can change of a process, as they see it."""
    setup = sidecar.setup
    _, _, body = await OneProcess(sidecar, None).answer("GET", "/admin/health", b"")
    health = json.loads(body)
    seen = ("name", "model", "weight", "by_hand", "healthy")
    return {
        "targets": [{key: target[key] for key in seen} for target in health["targets"]],
        "canaries": {
            name: {key: one[key] for key in ("candidate", "state", "share", "step")}
            for name, one in health.get("canaries", {}).items()
        },
        "circuits": {
            (name, called): breaker.state(called)
            for name, known in setup.circuits.items()
            for called, breaker in known
        },
    }


async def do_all(given: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "gateway.toml"
        file.write_text(WHOLE)
        alone = Sidecar(parse(WHOLE), MemoryEngine(FakeProvider()))
        desk = OneProcess(alone, Reloader(alone, file))
        crew, desk_of_all = crew_of(file)
        await crew.serve()
        for what, how in given:
            match what:
                case "post":
                    path, body = how
                    status, _, _ = answer = await desk_of_all.answer("POST", path, body)
                    if status != 503:  # nobody serves
                        assert answer[0] == (await desk.answer("POST", path, body))[0]
                case "reload":
                    file.write_text(how)
                    assert (await desk_of_all.answer("POST", "/admin/reload", b""))[0] == (
                        await desk.answer("POST", "/admin/reload", b"")
                    )[0]
                case "dies":
                    crew.all[how] = Worker(how, crew.orders)
                case "serve":
                    await crew.serve()
        await crew.serve()
        await crew.restart(0)  # one that has seen nothing
        expected = await standing(alone)
        for worker in crew.all:
            assert await standing(worker.sidecar) == expected


@settings(max_examples=40)
@given(steps)
def test_all_workers_stand_as_one_process_that_saw_the_same(given: list[Step]) -> None:
    run_virtual(do_all, given)


def circuit(name: str, action: str) -> Step:
    return "post", (f"/admin/circuits/{name}/{action}", b"")


def weight(name: str, number: float) -> Step:
    return "post", (f"/admin/targets/{name}/weight", json.dumps({"weight": number}).encode())


def canary(**body: object) -> Step:
    return "post", ("/admin/canary/c1", json.dumps(body).encode())


@pytest.mark.parametrize(
    "given",
    [
        [canary(do="promote"), ("reload", TEXTS[1])],
        [canary(share=0.3), ("reload", TEXTS[2])],
        [circuit("one/a", "isolate"), circuit("one", "close")],
        [circuit("one", "isolate"), circuit("one/a", "close")],
        [weight("one", 2), weight("one/a", 3)],
        [weight("one", 2), ("reload", TEXTS[5]), weight("two/a", 3)],
        [canary(share=0.5), canary(do="resume")],
        [canary(step=1), canary(do="hold")],
        [canary(share=0.7), canary(do="hold"), canary(do="resume")],
        [circuit("two", "isolate"), canary(do="promote"), ("reload", TEXTS[4]), ("reload", WHOLE)],
        [circuit("one", "isolate"), ("reload", TEXTS[6]), ("dies", 0), ("serve", None), ("reload", TEXTS[5])],
        [circuit("two", "isolate"), ("dies", 0), ("dies", 1), ("reload", TEXTS[4]), ("reload", WHOLE)],
        [("dies", 0), circuit("two", "isolate"), ("reload", TEXTS[3]), circuit("two", "close")],
    ],
)
def test_what_an_order_comes_to_depends_on_those_before(given: list[Step]) -> None:
    run_virtual(do_all, given)


asynchronous = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


@pytest.mark.anyio
@asynchronous
@pytest.mark.parametrize(
    ("before", "by_itself", "order", "after"),
    [
        ({"do": "resume"}, {"state": "running", "share": 0.5}, {"do": "hold"}, ("held", 0.5)),
        ({"step": 1}, {"state": "rolled_back", "share": 0.0}, {"do": "resume"}, ("running", 0.1)),
    ],
)
async def test_a_canary_that_went_on_by_itself_is_told_as_it_stands_when_it_is_changed(
    before: object, by_itself: Standing, order: object, after: tuple[str, float], tmp_path: Path
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(WHOLE)
    crew, desk = crew_of(file)
    await crew.serve()
    await desk.answer("POST", "/admin/canary/c1", json.dumps(before).encode())
    for worker in crew.workers:
        place(worker.sidecar.setup.canaries["c1"], by_itself)
    assert (await desk.answer("POST", "/admin/canary/c1", json.dumps(order).encode()))[0] == 200
    await crew.restart(1)
    for worker in crew.workers:
        status = worker.sidecar.setup.canaries["c1"].status()
        assert (status.state.value, status.share) == after


@pytest.mark.anyio
@asynchronous
async def test_a_canary_that_has_cooled_off_is_not_rolled_back_again(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(WHOLE)
    crew, desk = crew_of(file)
    await crew.serve()
    await desk.answer("POST", "/admin/canary/c1", b'{"do": "roll_back"}')
    await crew.restart(1)
    assert crew.all[1].sidecar.setup.canaries["c1"].status().share == 0
    assert crew.orders.first()["by_hand"] != taken(Sidecar(parse(WHOLE), MemoryEngine(FakeProvider())).setup)
    await anyio.sleep(3601)
    await crew.restart(1)
    assert crew.all[1].sidecar.setup.canaries["c1"].status().share == 0.1


@pytest.mark.anyio
@asynchronous
async def test_circuits_that_are_shared_are_for_the_store_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    monkeypatch.setenv("STORE_URL", "redis://127.0.0.1:1")
    file = tmp_path / "gateway.toml"
    file.write_text(WHOLE)
    orders = Orders(file)
    orders.change("/admin/circuits/two/isolate", b"")
    text = WHOLE + '[store]\nredis_env = "STORE_URL"\n'
    sidecar = Sidecar(parse(text), MemoryEngine(FakeProvider()))
    by_hand: Any = orders.first()["by_hand"]
    assert by_hand["circuits"] == [("two", "two"), ("two", "two/a")]
    give(sidecar.setup, by_hand)
    breaker = sidecar.setup.circuits["two"][0][1]
    assert (breaker.state("two"), breaker.states()) == (CircuitState.CLOSED, {})
    assert {one["name"] for one in (await standing(sidecar))["targets"] if one["by_hand"]} == {"two", "two/a"}
    file.write_text(text)
    kept = Orders(file)
    kept.change("/admin/circuits/two/isolate", b"")
    assert all(one.store is None for _, one in (await kept.checked()).setup.circuits["two"])
    await sidecar.aclose()


@pytest.mark.anyio
@asynchronous
@pytest.mark.parametrize(
    "table", ["circuit = { consecutive_failures = 3 }", "quota = { requests_per_minute = 9 }"]
)
async def test_what_a_worker_would_refuse_for_what_it_is_now_none_is_told_of(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    monkeypatch.setenv("STORE_URL", "redis://127.0.0.1:1")
    kept = '[store]\nredis_env = "STORE_URL"\n[targets.one]\nurl = "http://one.example/v1"\n'
    before = f"{kept}quota = {{ requests_per_minute = 5 }}\n"
    after = f"{before}{table}\n" if table.startswith("circuit") else f"{kept}{table}\n"
    file = tmp_path / "gateway.toml"
    file.write_text(before)
    alone = Sidecar(parse(before), MemoryEngine(FakeProvider()))
    crew, desk = crew_of(file)
    await crew.serve()
    file.write_text(after)
    expected = await OneProcess(alone, Reloader(alone, file)).answer("POST", "/admin/reload", b"")
    answered = await desk.answer("POST", "/admin/reload", b"")  # and no worker is ended for it
    assert (answered[0], json.loads(answered[2])["reloaded"]) == (
        expected[0],
        json.loads(expected[2])["reloaded"],
    )
    for sidecar in (alone, *(worker.sidecar for worker in crew.all)):
        await sidecar.aclose()


@pytest.mark.anyio
@asynchronous
async def test_what_is_done_for_later_ones_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(WHOLE)
    orders = Orders(file)
    with caplog.at_level(logging.INFO, logger="resilient_llm"):
        for path, body in (("/admin/circuits/two/isolate", b""), ("/admin/canary/c1", b'{"do": "promote"}')):
            done_so = orders.change(path, body)
            assert done_so is not None
            assert done_so[0] == 200
        assert orders.change("/admin/nothing", b"") is None
        assert not caplog.records
        logging.getLogger("resilient_llm").info("said")
    assert len(caplog.records) == 1


@pytest.mark.anyio
@asynchronous
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_a_worker_reloads_for_nothing_but_a_post(method: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(WHOLE)
    crew, desk = crew_of(file)
    await crew.serve()
    with logged() as log:
        status, headers, _ = await desk.answer(method, "/admin/reload", TEXTS[4].encode())
    assert (status, (b"allow", b"POST") in headers, log.lines) == (405, True, [])
    assert "two" in crew.all[0].sidecar.setup.config.targets
