import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from resilient_llm.testing import (
    OK,
    FakeModel,
    FakeProvider,
    Fault,
    Latency,
    RateLimits,
    flapping,
    random_faults,
)
from resilient_llm.testing._request_log import ProviderRequest


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fault(status=199), "status must be an HTTP status of 200 to 599, got 199"),
        (lambda: Fault(status=600), "got 600"),
        (lambda: Fault(delay_headers=-1), "delay_headers must be >= 0 seconds, got -1"),
        (lambda: Fault(delay_first_token=math.nan), "delay_first_token must be >= 0 seconds, got nan"),
        (lambda: Fault(token_delay=-0.1), "token_delay must be >= 0 seconds"),
        (lambda: Fault(ping_every=0), "ping_every must be > 0 seconds and finite, got 0"),
        (lambda: Fault(cut_after_tokens=-1), "cut_after_tokens must be >= 0 tokens, got -1"),
        (lambda: Fault(malformed_event_at=-1), "malformed_event_at must be >= 0 tokens"),
        (lambda: Fault(chunk_size=0), "chunk_size must be >= 1 byte, got 0"),
        (
            lambda: Fault(cut_after_tokens=1, stall_after_tokens=2),
            "cut_after_tokens and stall_after_tokens exclude",
        ),
        (lambda: Fault(reset=True, empty_stream=True), "reset and empty_stream exclude each other"),
        (lambda: Fault(status=429, cut_after_tokens=1), "no reply that cut_after_tokens could apply to"),
        (lambda: Fault(body="x", omit_done=True), "no reply that omit_done could apply to"),
        (lambda: Fault(status=500, reset=True), "no reply that reset could apply to"),
        (
            lambda: Fault(error_event_at=0, body="text"),
            "the body of an error event must be a mapping, got 'text'",
        ),
        (lambda: FakeModel(max_concurrent=0), "max_concurrent must be >= 1, or None, got 0"),
        (lambda: FakeModel(knee=0), "knee must be >= 1, or None, got 0"),
        (lambda: FakeModel(overload=OK), "overload must be a Fault with a status or a body"),
        (lambda: Latency(per_token=-1), "per_token must be >= 0, got -1"),
        (
            lambda: RateLimits(requests_per_minute=0),
            "requests_per_minute must be > 0, or None for no limit, got 0",
        ),
        (
            lambda: RateLimits(tokens_per_minute=math.inf),
            "tokens_per_minute must be > 0, or None for no limit, got inf",
        ),
        (lambda: RateLimits(window=0), "window must be > 0 seconds, got 0"),
        (lambda: flapping(up=0, down=1), "up must be > 0 seconds, got 0"),
        (lambda: flapping(up=1, down=-1), "down must be > 0 seconds, got -1"),
        (
            lambda: random_faults([(0.6, OK), (0.6, OK)], rng=random.Random()),
            "add up to at most 1, got .0.6, 0.6.",
        ),
        (lambda: random_faults([(-0.1, OK)], rng=random.Random()), "probabilities must be >= 0"),
        (lambda: FakeProvider(max_requests_kept=-1), "max_requests_kept must be >= 0, got -1"),
    ],
)
def test_what_is_out_of_range_is_refused_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_scripts_are_made_of_faults() -> None:
    provider = FakeProvider()
    steps: list[Any] = [Fault(status=500), 500]
    with pytest.raises(TypeError, match="a script is made of Fault values, got 500"):
        provider.script("m", steps)
    with pytest.raises(TypeError, match="got 500"):
        random_faults([(0.1, steps[1])], rng=random.Random())


def test_faults_are_values() -> None:
    assert Fault(status=429, headers={"retry-after": "2"}) == Fault(status=429, headers={"retry-after": "2"})
    assert len({Fault(status=429), Fault(status=429), OK}) == 2
    assert Fault() == OK
    assert not OK.is_answer
    assert Fault(status=500).is_answer
    assert Fault(body={}).is_answer
    assert not Fault(status=500, error_event_at=0).is_answer


def request_at(time: float) -> ProviderRequest:
    return ProviderRequest(number=1, method="POST", path="/", headers={}, tenant=None, arrived=time)


def test_flapping_is_up_then_down_from_the_first_request_on() -> None:
    down = Fault(status=500)
    choose = flapping(up=10, down=2, fault=down)
    times = [100, 109.9, 110, 111.9, 112, 121.9, 122]
    assert [choose(request_at(time)) is down for time in times] == [
        False,
        False,
        True,
        True,
        False,
        False,
        True,
    ]


def test_random_faults_come_as_often_as_told_and_repeat_with_the_seed() -> None:
    rare, common = Fault(status=500), Fault(reset=True)

    def draws() -> list[Fault]:
        choose = random_faults([(0.05, rare), (0.25, common)], rng=random.Random(7))
        return [choose(request_at(0)) for _ in range(10_000)]

    first = draws()
    assert draws() == first
    counts = Counter(first)
    assert 400 < counts[rare] < 600
    assert 2300 < counts[common] < 2700
    assert counts[OK] == 10_000 - counts[rare] - counts[common]


def test_latency_spreads_around_its_median() -> None:
    rng = random.Random(1)
    draws = sorted(
        Latency(headers=1, first_token=2, per_token=3, spread=0.5).draw(rng).headers for _ in range(1001)
    )
    assert 0.9 < draws[500] < 1.1
    assert draws[0] < 0.5
    assert draws[-1] > 2
    assert Latency(headers=1).draw(rng) == Latency(headers=1)
