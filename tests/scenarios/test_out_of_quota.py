"""Keys of a target run out of quota, one or all of them, and come back.

One call a second. The provider answers `insufficient_quota`, a 429 that waiting does not cure, from 20 s on. A key that
did is left alone for 60 s, then for 120 s, and so on; after each time one call tries it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pytest

from resilient_llm import CircuitBreaker, Retry, Router
from resilient_llm.credentials import Credential
from resilient_llm.lab import Key, Outage, Paced, Report, Upstream, simulate
from resilient_llm.routing.balancers import Priority
from tests.scenarios.support import answered_by, network, target

BOTH = pytest.mark.parametrize("backend", ["asyncio", "trio"])
Backend = Literal["asyncio", "trio"]

KEYS = ("k1", "k2", "k3")


def run(
    keys: Sequence[str],
    *,
    empty: Sequence[str],
    until: float = 140,
    other: bool = False,
    duration: float = 240,
    backend: Backend = "asyncio",
) -> Report:
    """Take the quota of some keys of the target `a` from 20 s on; `other` is a second target."""
    outages = [Outage(20, until, "insufficient_quota", key=key) for key in empty]
    upstreams = {"a": Upstream(first_token=0.3, outages=outages, keys={key: Key() for key in keys})}
    credentials = [Credential(name=key, value=lambda key=key: key) for key in keys]  # type: ignore[misc]
    targets = [target("a", CircuitBreaker(), provider="openai", credentials=credentials)]
    if other:
        upstreams["b"] = Upstream(first_token=0.3)
        targets.append(target("b"))
    router = Router(targets, balancer=Priority())
    return simulate(
        [Retry(), router],
        network(**upstreams),
        Paced(1.0),
        duration=duration,
        backend=backend,
    )


def used(report: Report, since: float, until: float) -> Counter[str | None]:
    """Count the requests with each key."""
    return Counter(sent.key for sent in report.upstreams["a.test"].exchanges if since <= sent.arrived < until)


def refused(report: Report, key: str) -> list[float]:
    """Give when a key was refused."""
    sent = report.upstreams["a.test"].exchanges
    return [round(one.arrived, 3) for one in sent if one.key == key and one.status == 429]


@BOTH
def test_of_several_keys_the_empty_one_is_set_aside_and_the_others_serve(backend: Backend) -> None:
    report = run(KEYS, empty=["k2"], other=True, backend=backend)
    assert report.success_ratio == 1
    assert answered_by(report) == {"a": 240}, "the target is as good as before: no call went elsewhere"
    assert used(report, 0, 18) == {"k1": 6, "k2": 6, "k3": 6}
    first, second = refused(report, "k2")
    assert first in (20, 21, 22), "its next turn"
    assert first + 60 <= second <= first + 62, "one call a minute later, and then none for two minutes"
    assert sum(call.attempts for call in report.calls) == 240 + 2
    assert report.latency.max == pytest.approx(0.35), "with another key at once"


@BOTH
def test_a_key_that_has_quota_again_is_used_again(backend: Backend) -> None:
    report = run(KEYS, empty=["k2"], until=70, backend=backend)
    assert len(refused(report, "k2")) == 1
    assert used(report, 24, 80)["k2"] == 0
    shares = used(report, 90, 240)
    assert sum(shares.values()) == 150
    assert min(shares.values()) >= 45, "a third each"


@BOTH
def test_when_all_are_empty_the_other_target_answers(backend: Backend) -> None:
    report = run(KEYS, empty=KEYS, until=70, other=True, backend=backend)
    assert report.success_ratio == 1
    assert sum(used(report, 20, 24).values()) == 3, "each was tried once"
    assert sum(used(report, 24, 80).values()) == 0
    assert answered_by(report.where(since=20, until=80)) == {"b": 60}
    assert answered_by(report.where(since=90)) == {"a": 150}, "all keys are back"


@BOTH
def test_a_circuit_does_not_open_for_the_keys(backend: Backend) -> None:
    """It would shut out the good keys too, and they are told apart."""
    keys = [f"k{number}" for number in range(8)]
    report = run(keys, empty=keys[:7], until=1e6, duration=60, backend=backend)
    assert report.success_ratio == 1
    assert used(report, 30, 60) == {"k7": 30}


@BOTH
def test_without_another_target_calls_are_refused_until_the_key_is_tried_again(backend: Backend) -> None:
    report = run(["k1"], empty=["k1"], until=70, backend=backend)
    assert refused(report, "k1") == [20]
    first_call = report.where(since=20, until=21).calls[0]
    assert first_call.status == 429, "what the provider said; waiting does not cure it"
    while_set_aside = report.where(since=21, until=80)
    assert {call.outcome for call in while_set_aside.calls} == {"rejected"}
    assert while_set_aside.latency.max == 0, "nobody waits for a key that is dead"
    assert sum(used(report, 21, 80).values()) == 0
    assert report.where(since=82).success_ratio == 1
