"""Limits that listen: what replies of a provider do to the limits that mirror its own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import anyio
import httpx
import pytest

from resilient_llm import AttemptError, Limit, Outcome, RateLimit, RateLimitedError
from resilient_llm.httpx import ResilientTransport
from resilient_llm.message import Headers
from resilient_llm.testing import FakeModel, FakeProvider, Latency, RateLimits
from tests.policies.rate_limiting import Answer, Answers, by_body, together
from tests.support import THROTTLED, Door

pytestmark = pytest.mark.anyio


def headers(**values: object) -> Headers:
    return [
        (f"x-ratelimit-{name.replace('_', '-')}".encode(), str(value).encode())
        for name, value in values.items()
    ]


def remaining(limit: RateLimit, door: Door) -> dict[str, float]:
    return {level.name: round(level.remaining, 6) for level in limit.levels(door.calls[-1])}


async def test_a_limit_of_the_target_slows_down_before_the_provider_refuses() -> None:
    provider = Answers(Answer(headers=headers(remaining_requests=2, limit_requests=60, reset_requests="58s")))
    door = Door(RateLimit(key="target", requests_per_minute=60), provider=provider)
    await door()
    await together([door] * 4)
    assert provider.times == [0, 0, 0, 1, 2]


async def test_what_was_sent_since_is_taken_off_what_remains() -> None:
    said = headers(remaining_requests=5, limit_requests=60, reset_requests="55s")
    provider = Answers(Answer(headers=said, duration=1.0), *[Answer(duration=1.0)] * 7)
    door = Door(RateLimit(key="target", requests_per_minute=60), provider=provider)
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await anyio.sleep(0.5)
        for _ in range(7):
            group.start_soon(door)
    await door()
    # When the reply came, seven of the five that remained had been sent, and one refilled: in debt by one.
    assert provider.times == [0, *[0.5] * 7, 3]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
@pytest.mark.parametrize("window", [1.0, 10.0])
async def test_listening_costs_no_throughput_where_the_provider_enforces_by_the_second(
    path: str, window: float
) -> None:
    provider = FakeProvider(
        FakeModel(
            latency=Latency(headers=0.5), rate_limits=RateLimits(requests_per_minute=600, window=window)
        )
    )
    limit = RateLimit(key="model", requests_per_minute=600, window=window, max_wait=1e6)
    transport = ResilientTransport(provider.transport(), policies=[limit])
    started = anyio.current_time()
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1", timeout=None) as client:
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        async with anyio.create_task_group() as group:
            for _ in range(300):
                group.start_soon(partial(client.post, path, json=body))
    assert [request.status for request in provider.requests] == [200] * 300
    ideal = (300 - 10 * window) / 10
    assert anyio.current_time() - started <= ideal / 0.98 + 0.6


async def test_tokens_are_listened_to_as_well() -> None:
    provider = Answers(Answer(headers=headers(remaining_tokens=150, limit_tokens=6_000)))
    door = Door(RateLimit(key="model", tokens_per_minute=6_000, estimate=by_body), provider=provider)
    await door(body=b"100")
    await together([partial(door, body=b"100"), partial(door, body=b"100")])
    assert provider.times == [0, 0, 0.5]


async def test_a_failed_attempt_s_headers_count_too() -> None:
    refusal = replace(THROTTLED, retry_after=8.0, retry_after_source="retry-after")
    provider = Answers(Answer(outcome=refusal))
    limit = RateLimit(key="target", requests_per_minute=60)
    door = Door(limit, provider=provider)
    with pytest.raises(AttemptError):
        await door()
    await door()
    assert provider.times == [0, 8]
    assert remaining(limit, door)["requests of target"] == pytest.approx(7)


@pytest.mark.parametrize(
    ("refusal", "wait"),
    [
        (THROTTLED, 40),
        (replace(THROTTLED, retry_after=40.0, retry_after_source="ratelimit-reset"), 40),
        (replace(THROTTLED, retry_after=3.0, retry_after_source="retry-after"), 3),
    ],
    ids=["no hint", "the reset itself", "a better hint"],
)
async def test_after_a_refusal_without_retry_after_the_end_of_the_window_is_waited_for(
    refusal: Outcome, wait: float
) -> None:
    said = headers(remaining_requests=0, limit_requests=60, reset_requests="40s")
    provider = Answers(Answer(outcome=refusal, headers=said))
    door = Door(RateLimit(key="target", requests_per_minute=60, max_wait=60), provider=provider)
    with pytest.raises(AttemptError):
        await door()
    await door()
    assert provider.times == [0, wait]


async def test_those_who_wait_already_are_held_as_well() -> None:
    refusal = replace(THROTTLED, retry_after=8.0, retry_after_source="retry-after")
    provider = Answers(Answer(outcome=refusal, duration=0.5))
    door = Door(RateLimit(key="target", requests_per_minute=60, window=1), provider=provider)
    await together([door, door, door])
    assert provider.times == [0, 8.5, 9.5]


async def test_a_reset_that_is_only_a_bound_holds_nobody() -> None:
    refusal = replace(THROTTLED, retry_after=60.0, retry_after_source="ratelimit-reset")
    exhausted = headers(remaining_requests=0, limit_requests=60, reset_requests="60s")
    provider = Answers(Answer(outcome=refusal, headers=exhausted))
    door = Door(RateLimit(key="target", requests_per_minute=60), provider=provider)
    with pytest.raises(AttemptError):
        await door()
    await together([door, door])
    assert provider.times == [0, 1, 2]


async def test_whoever_cannot_wait_that_long_is_told_when_to_come_back() -> None:
    refusal = replace(THROTTLED, retry_after=100.0, retry_after_source="retry-after")
    door = Door(RateLimit(key="target", requests_per_minute=60), provider=Answers(Answer(outcome=refusal)))
    with pytest.raises(AttemptError):
        await door()
    with pytest.raises(RateLimitedError) as refused:
        await door()
    assert refused.value.retry_after == pytest.approx(100)


@pytest.mark.parametrize(
    ("limits", "listening"),
    [
        pytest.param(
            [Limit(key="tenant", burst=9, requests_per_minute=60)], set(), id="tenants' limits are ours"
        ),
        pytest.param([Limit(key="target", requests_per_minute=60)], {"target"}, id="target"),
        pytest.param([Limit(key="model", requests_per_minute=60)], {"model"}, id="model"),
        pytest.param([Limit(key=("target", "model"), requests_per_minute=60)], {"target+model"}, id="both"),
        pytest.param([Limit(key=None, requests_per_minute=60)], {"account"}, id="account"),
        pytest.param(
            [Limit(key=None, requests_per_minute=60), Limit(key="model", requests_per_minute=60)],
            {"model"},
            id="what a model has left says little of the account",
        ),
        pytest.param(
            [Limit(key="tenant", requests_per_minute=60), Limit(key=None, requests_per_minute=60)],
            {"account"},
            id="account beside tenants",
        ),
        pytest.param([Limit(key=lambda call: call.model, requests_per_minute=60)], set(), id="who knows"),
        pytest.param([Limit(key="tenant", requests_per_minute=60, learn=True)], {"tenant"}, id="told to"),
        pytest.param([Limit(key="target", requests_per_minute=60, learn=False)], set(), id="told not to"),
    ],
)
async def test_which_limits_listen(limits: list[Limit], listening: set[str]) -> None:
    limit = RateLimit(limits=limits)
    door = Door(limit, provider=Answers(Answer(headers=headers(remaining_requests=5, limit_requests=60))))
    await door()
    lowered = {
        name.removeprefix("requests of ") for name, left in remaining(limit, door).items() if left == 5
    }
    assert lowered == listening


async def test_at_the_asgi_door_nobody_listens_to_the_app() -> None:
    limit = RateLimit(key=None, requests_per_minute=60)
    door = Door(limit, provider=Answers(Answer(headers=headers(remaining_requests=5))))

    await door()
    call = door.calls[0]
    assert remaining(limit, door)["requests of account"] == 5
    call.inbound = True
    provider = Answers(Answer(headers=headers(remaining_requests=0)))
    await limit(call, provider)
    assert remaining(limit, door)["requests of account"] == 4


def openai_transport(provider: FakeProvider, limit: RateLimit) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=ResilientTransport(provider.transport(), policies=[limit]))


async def ask(client: httpx.AsyncClient, max_tokens: int = 50) -> int:
    body = {"model": "m", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hello " * 20}]}
    reply = await client.post("https://api.openai.com/v1/chat/completions", content=json.dumps(body))
    return reply.status_code


async def test_many_at_once_meet_a_provider_that_enforces_both_limits() -> None:
    limits = RateLimits(requests_per_minute=600, tokens_per_minute=40_000)
    provider = FakeProvider(FakeModel(latency=Latency(headers=1.0), reply="word " * 50, rate_limits=limits))
    limit = RateLimit(
        key="target",
        requests_per_minute=600,
        tokens_per_minute=40_000,
        estimate=lambda _call: 80,
        max_wait=1e6,
        max_queued=1_000,
    )
    statuses: list[int] = []
    started = anyio.current_time()
    async with openai_transport(provider, limit) as client, anyio.create_task_group() as group:

        async def one() -> None:
            statuses.append(await ask(client))

        for _ in range(1_000):
            group.start_soon(one)
    seconds = anyio.current_time() - started
    assert statuses.count(429) / len(statuses) < 0.003
    tokens = 80 * len(statuses)
    possible = 40_000 + 40_000 / 60 * seconds
    assert tokens >= 0.95 * possible
    assert len(statuses) == 1_000


async def test_it_notices_that_others_have_used_up_the_account() -> None:
    throttled = {}
    for learn in (True, False):
        limits = RateLimits(requests_per_minute=120)
        provider = FakeProvider(FakeModel(latency=Latency(headers=0.5), rate_limits=limits))
        limit = RateLimit(key="target", requests_per_minute=120, max_wait=1e6, learn=learn)
        statuses: list[int] = []

        async def one(client: httpx.AsyncClient, statuses: list[int]) -> None:
            statuses.append(await ask(client))

        async with httpx.AsyncClient(transport=provider.transport()) as others:
            await together([partial(ask, others)] * 110)
        async with openai_transport(provider, limit) as client, anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(one, client, statuses)
                await anyio.sleep(0.2)
        throttled[learn] = statuses.count(429)
    assert throttled[False] > 40
    assert throttled[True] <= 3
