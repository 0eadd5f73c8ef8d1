"""Three real processes with one circuit: what one opens is open for all, and the probes of all are counted together."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks._children import Watch
from tests.stores.cluster import wait_for

pytestmark = pytest.mark.realtime

Start = Callable[..., list["Worker"]]


class Worker:
    """A process that runs `circuit_worker`."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stores.circuit_worker", url, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._watch = Watch(self._process)
        self.answer()

    def ask(self, *words: Any) -> Any:
        """Have it do something, and wait for what came of it."""
        self.tell(*words)
        return self.answer()

    def tell(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._watch.release()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes that share a server."""
    workers: list[Worker] = []

    def make(server: Any, count: int = 3, **options: Any) -> list[Worker]:
        defaults = {"consecutive_failures": 2, "break_duration": 1.0, "max_break_duration": 5.0}
        with ThreadPoolExecutor() as pool:
            workers.extend(pool.map(lambda _: Worker(server.url, defaults | options), range(count)))
        return workers

    yield make
    for worker in workers:
        worker.kill()


def opened(one: Worker, *others: Worker) -> None:
    """Have one open the circuit, and all others hear of it."""
    for other in others:
        assert other.ask("call", "ok")["through"]
    for _ in range(2):
        one.ask("call", "fail")
    for other in others:
        other.ask("until", "open")


def test_opening_isolating_and_closing_reach_all(server: Any, start: Start) -> None:
    one, two, three = start(server, break_duration=300.0, max_break_duration=300.0)
    opened(one, two, three)
    assert not two.ask("call", "ok")["through"]
    assert not three.ask("call", "ok")["through"]
    for name, state in (("close", "closed"), ("isolate", "isolated"), ("close", "closed")):
        two.ask(name)
        for other in (one, three):
            other.ask("until", state)


def test_probes_are_counted_over_all_processes(server: Any, start: Start) -> None:
    workers = start(server, half_open_max_calls=2, success_threshold=2)
    opened(*workers)
    time.sleep(1.1)
    for worker in workers:
        worker.tell("burst", 20, "ok")
    assert sum(worker.answer()["through"] for worker in workers) == 2
    for worker in workers:
        worker.ask("finish")
    for worker in workers:
        worker.ask("until", "closed")


def test_a_failed_probe_lengthens_the_break_of_all(server: Any, start: Start) -> None:
    workers = start(server, break_multiplier=4.0)
    opened(*workers)
    time.sleep(1.1)
    for worker in workers:
        worker.tell("burst", 5, "fail")
    assert sum(worker.answer()["through"] for worker in workers) == 1
    began = time.monotonic()
    for worker in workers:
        worker.ask("finish")
    time.sleep(1.2)
    for worker in workers:
        through = worker.ask("call", "ok")["through"]
        assert not through or time.monotonic() - began > 4.0, "the second break is four times as long"
    time.sleep(4.0)
    assert workers[2].ask("call", "ok")["through"]


def test_the_probe_of_a_killed_process_is_given_up(server: Any, start: Start) -> None:
    workers = start(server, probe_timeout=3.0)
    opened(*workers)
    time.sleep(1.1)
    one, two, three = workers
    began = time.monotonic()
    one.tell("call", "hang")
    two.ask("until", "half_open")
    one.kill()
    workers.remove(one)
    # A lost probe counts as failed, so that what follows is another break, of a second and a half.
    for worker in (two, three):
        through = worker.ask("call", "ok")["through"]
        assert not through or time.monotonic() - began > 4.5

    wait_for(lambda: any(worker.ask("call", "ok")["through"] for worker in (two, three)), "another probe")
    assert time.monotonic() - began > 4.4
    for worker in (two, three):
        worker.ask("until", "closed")
