"""Eight processes, one limit, real servers: never a request too many, hardly one too few.

What was granted is noted by the server in the very script that grants it, with the server's time. By default each
kind of caller meets one of the servers, each of another sort; STORE_TESTS=all tries every pair.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.cluster import RedisCluster

from tests.stores.conftest import Server
from tests.stores.processes import CAPACITY, RATE, Setting, Workers, most_missing, order, used_ratio

pytestmark = pytest.mark.realtime

PROCESSES = 8
SERVERS = (
    "valkey9 RESP2",
    "valkey9 RESP3",
    "redis7 RESP2",
    "redis7 RESP3",
    "valkey9 cluster",
    "redis7 cluster",
)
FEW = {
    "refused": {"valkey9 RESP3"},
    "waiting": {"redis7 RESP2"},
    "settling": {"valkey9 cluster"},
}


def pairs(caller: str) -> list[str]:
    return [each for each in SERVERS if os.environ.get("STORE_TESTS") == "all" or each in FEW[caller]]


@pytest.fixture(scope="session")
def setting_of(
    running: Callable[[str], Server], cluster_of: Callable[[str], list[Server]]
) -> Callable[[str], Setting]:
    def get(name: str) -> Setting:
        kind, how = name.split()
        if how == "cluster":
            port = cluster_of(kind)[0].port
            return Setting(
                f"redis://127.0.0.1:{port}/0", True, lambda: RedisCluster(host="127.0.0.1", port=port)
            )
        server = running(kind)
        return Setting(f"{server.url}?protocol={how[-1]}", False, lambda: server.admin)

    return get


@pytest.fixture(scope="module")
def workers(setting_of: Callable[[str], Setting]) -> Iterator[Workers]:
    made = Workers(PROCESSES)
    # Everything is slow for the first time, and worth no measurement.
    made.run(order(setting_of("valkey9 RESP3"), "waiting", seconds=0.3))
    yield made
    made.close()


@pytest.mark.parametrize("where", pairs("refused"))
def test_callers_that_are_refused_and_come_back(
    workers: Workers, setting_of: Callable[[str], Setting], where: str
) -> None:
    setting = setting_of(where)
    told = order(setting, "refused")
    tallies = workers.run(told)
    check_requests(setting, told, tallies)
    assert sum(each["refused"] for each in tallies) > 24  # more than there are callers


@pytest.mark.parametrize("where", pairs("waiting"))
def test_callers_that_wait_in_line(
    workers: Workers, setting_of: Callable[[str], Setting], where: str
) -> None:
    setting = setting_of(where)
    limit = {"requests_per_minute": RATE * 60, "window": CAPACITY / RATE, "max_wait": 30}
    told = order(setting, "waiting", limit=limit, callers=10)
    tallies = workers.run(told)
    check_requests(setting, told, tallies)
    assert not sum(each["refused"] for each in tallies)
    granted = [each["granted"] for each in tallies]
    # Nobody's waiting room is passed over for another's.
    assert min(granted) > 0.25 * (1 - stalled_ratio(tallies)) * max(granted)


def check_requests(setting: Setting, told: dict[str, Any], tallies: list[dict[str, Any]]) -> None:
    check_answered(tallies)
    notes = setting.notes(told["prefix"])
    assert sum(each["granted"] for each in tallies) == sum(note.taken[0] for note in notes)
    # The script's time and the note's are microseconds apart: far less than one request's worth.
    assert most_missing(notes, RATE, CAPACITY) < CAPACITY + 0.5
    since, until = max(each["wanted"][0] for each in tallies), min(each["wanted"][1] for each in tallies)
    used = used_ratio(notes, RATE, CAPACITY, since, until)
    # What nobody took while processes stood still is lost, once the bucket is full.
    assert used >= 0.98 * (1 - stalled_ratio(tallies))


def stalled_ratio(tallies: list[dict[str, Any]]) -> float:
    """Say for what part of its time the unluckiest process could not run, by no fault of its own."""
    ratios: list[float] = [each["stalled"] / (each["wanted"][1] - each["wanted"][0]) for each in tallies]
    return min(1.0, max(ratios))


@pytest.mark.parametrize("where", pairs("settling"))
def test_tokens_are_reserved_and_settled_while_callers_are_cancelled(
    workers: Workers, setting_of: Callable[[str], Setting], where: str
) -> None:
    setting = setting_of(where)
    rate, capacity = 20_000.0, 2_000.0
    limit = {"tokens_per_minute": rate * 60, "window": capacity / rate, "max_wait": 30}
    told = order(setting, "settling", limit=limit, callers=6)
    tallies = workers.run(told)
    check_answered(tallies)
    notes = setting.notes(told["prefix"])
    assert (
        most_missing(notes, rate, capacity) < capacity + 0.001 * rate
    )  # one reservation is 10 at least: none too many
    taken = sum(note.taken[0] for note in notes)
    assert taken == pytest.approx(sum(each["used"] for each in tallies), abs=1e-3)
    assert sum(each["cancelled"] for each in tallies) > 10
    # Nothing is held for callers that have gone: a second later nothing is kept at all.
    time.sleep(capacity / rate + 2.1)
    assert setting.buckets(told["prefix"]) == []


def check_answered(tallies: list[dict[str, Any]]) -> None:
    for each in tallies:
        assert (each["errors"], each["unavailable"], each["lost"], each["unguarded"]) == ([], 0, 0, 0)
