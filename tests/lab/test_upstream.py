"""A synthetic upstream answers, is slow, full, down and out of quota exactly as it was described."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from resilient_llm import ConfigurationError, Reply, Request
from resilient_llm.lab import (
    Bimodal,
    Key,
    Network,
    Outage,
    Phase,
    Sharing,
    Slots,
    Uniform,
    Upstream,
)
from resilient_llm.providers import dialect_for, read_body
from resilient_llm.testing import RateLimits
from tests.lab.support import Received, receive, request, send

pytestmark = pytest.mark.anyio


async def together(network: Network, count: int, **fields: Any) -> list[Received]:
    """Send so many requests at once; what was received is in order of arrival at the client."""
    received: list[Received] = []

    async def one() -> None:
        received.append(await send(network, **fields))

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(one)
    return received


async def read_into(chunks: list[bytes], reply: Reply) -> None:
    async for chunk in reply.stream:
        chunks.append(chunk)  # noqa: PERF401 - what came before an error stays


# Replies


async def test_a_reply_takes_its_first_token_and_then_each_further_one() -> None:
    network = Network(
        Upstream(first_token=0.5, per_token=0.01, output_tokens=101, input_price=2, output_price=8)
    )
    received = await send(network)
    assert received.status == 200
    assert received.seconds == pytest.approx(1.5)
    assert received.json["usage"]["total_tokens"] == 100 + 101
    [exchange] = network.log
    assert (exchange.answered, exchange.input_tokens, exchange.output_tokens) == (True, 100, 101)
    assert exchange.usd == pytest.approx((100 * 2 + 101 * 8) / 1e6)


async def test_a_stream_begins_with_its_first_token_and_ends_with_its_last() -> None:
    network = Network(Upstream(first_token=0.5, per_token=0.01, output_tokens=101))
    received = await send(network, stream=True, stream_options={"include_usage": True})
    assert [received.first, received.seconds] == pytest.approx([0.5, 1.5])
    assert received.headers["content-type"].startswith("text/event-stream")
    assert received.body.count(b" word") == 101
    assert b'"completion_tokens":101' in received.body
    assert received.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("max_events", [1, 2, 3, 50, 1000])
@pytest.mark.parametrize("tokens", [1, 2, 7, 100])
async def test_in_however_many_pieces_a_stream_comes_it_says_the_same(max_events: int, tokens: int) -> None:
    network = Network(Upstream(output_tokens=tokens, max_events=max_events))
    reply = await network(request(stream=True))
    chunks = [chunk async for chunk in reply.stream]
    assert len(chunks) == min(max_events, tokens)
    assert b"".join(chunks).count(b" word") == tokens
    assert chunks[0].count(b" word") == 1 or max_events == 1


async def test_a_total_may_be_given_in_place_of_a_time_for_each_token() -> None:
    network = Network(Upstream(first_token=0.2, total=3.0, output_tokens=10))
    assert (await send(network)).seconds == pytest.approx(3)
    streamed = await send(network, stream=True)
    assert [streamed.first, streamed.seconds] == pytest.approx([0.2, 3])
    assert (await send(network, max_tokens=1)).seconds == pytest.approx(3)


async def test_a_maximum_of_tokens_is_kept() -> None:
    received = await send(Network(Upstream(output_tokens=100)), max_tokens=7)
    assert received.json["usage"]["completion_tokens"] == 7
    assert received.json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_the_library_reads_what_was_used(path: str, stream: bool) -> None:
    network = Network(Upstream(output_tokens=42))
    sent = request(path=path, stream=stream, max_tokens=1000, stream_options={"include_usage": True})
    received = await receive(await network(sent), 0.0)
    if stream:
        assert b'tokens":42' in received.body
        return
    outcome, _ = read_body(dialect_for(sent), 200, [], received.body, operation="chat")
    assert outcome.ok
    assert outcome.usage is not None
    assert (outcome.usage.input_tokens, outcome.usage.output_tokens) == (100, 42)


# Failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 502, 503, 504, 529])
async def test_an_error_response(status: Any, stream: bool) -> None:
    network = Network(Upstream(failures={str(status): 1.0}, failure_latency=0.3))  # type: ignore[dict-item]
    received = await send(network, stream=stream)
    assert received.status == status
    assert received.seconds == pytest.approx(0.3)
    assert "error" in received.json
    assert (network.log[0].failure, network.log[0].usd) == (str(status), 0)


@pytest.mark.parametrize(
    ("kind", "error", "after"),
    [
        ("connect", httpx.ConnectError, 0.05),
        ("reset", httpx.ReadError, 0.05),
        ("silence", httpx.ReadTimeout, 60),
    ],
)
async def test_no_response(kind: Any, error: type[Exception], after: float) -> None:
    network = Network(Upstream(failures={kind: 1.0}), read_timeout=60)
    with pytest.raises(error):
        await send(network)
    assert anyio.current_time() == pytest.approx(after)
    [exchange] = network.log
    assert (exchange.failure, exchange.status) == (kind, None)
    assert network.serving[exchange.upstream].in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "error"), [("cut", httpx.RemoteProtocolError), ("stall", httpx.ReadTimeout)]
)
async def test_a_body_without_an_end(kind: Any, error: type[Exception], stream: bool) -> None:
    network = Network(
        Upstream(first_token=1, per_token=0.01, output_tokens=101, failures={kind: 1.0}, output_price=10),
        read_timeout=60,
    )
    reply = await network(request(stream=stream))
    chunks: list[bytes] = []
    with pytest.raises(error):
        await read_into(chunks, reply)
    assert chunks
    assert b"[DONE]" not in b"".join(chunks)
    [exchange] = network.log
    assert (exchange.status, exchange.failure) == (200, kind)
    assert exchange.usd > 0, "what was made is billed"
    assert network.serving[exchange.upstream].in_flight == 0


@pytest.mark.parametrize("kind", ["error_event", "late_error_event"])
async def test_an_error_within_a_200(kind: Any) -> None:
    network = Network(Upstream(first_token=1, per_token=0.01, output_tokens=101, failures={kind: 1.0}))
    streamed = await send(network, stream=True)
    assert streamed.status == 200
    assert b'"error"' in streamed.body
    assert (b" word" in streamed.body) == (kind == "late_error_event")
    whole = await send(network)
    assert (whole.status, "error" in whole.json) == (200, True)
    assert {exchange.failure for exchange in network.log} == {kind}


async def test_failures_come_as_often_as_told() -> None:
    network = Network(Upstream(failures={"500": 0.1, "503": 0.2, "reset": 0.05}, failure_latency=0))
    network.begin(seed=7)
    counts: dict[str | None, int] = {}
    for _ in range(4000):
        with contextlib.suppress(httpx.ReadError):
            await send(network)
    for exchange in network.log:
        counts[exchange.failure] = counts.get(exchange.failure, 0) + 1
    for kind, ratio in {"500": 0.1, "503": 0.2, "reset": 0.05, None: 0.65}.items():
        assert counts[kind] / 4000 == pytest.approx(ratio, abs=5 * math.sqrt(ratio * (1 - ratio) / 4000))


# When it is down, slow or smaller


async def test_an_outage_is_exact() -> None:
    network = Network(
        Upstream(first_token=0, failure_latency=0, outages=[Outage(10, 20), Outage(15, 30, "500")])
    )
    network.begin()
    seen = {}
    for at in (0, 9.999, 10, 15, 19.999, 20, 29.999, 30):
        await anyio.sleep(at - anyio.current_time())
        seen[at] = (await send(network)).status
    assert seen == {0: 200, 9.999: 200, 10: 503, 15: 503, 19.999: 503, 20: 500, 29.999: 500, 30: 200}


async def test_an_outage_says_when_to_come_back_and_may_hit_one_key_only() -> None:
    outage = Outage(0, 60, "429", key="a", retry_after=12)
    network = Network(Upstream(outages=[outage]))
    refused = await send(network, key="a")
    assert (refused.status, refused.headers["retry-after"]) == (429, "12")
    assert (await send(network, key="b")).status == 200


async def test_an_outage_may_hit_a_share() -> None:
    network = Network(Upstream(first_token=0, failure_latency=0, outages=[Outage(0, 60, share=0.25)]))
    network.begin(3)
    statuses = [(await send(network)).status for _ in range(2000)]
    assert statuses.count(503) == pytest.approx(500, abs=5 * math.sqrt(2000 * 0.25 * 0.75))


async def test_an_outage_may_let_replies_begin() -> None:
    network = Network(Upstream(outages=[Outage(0, 60, "cut")]))
    with pytest.raises(httpx.RemoteProtocolError):
        await send(network, stream=True)
    assert network.log[0].failure == "cut"


async def test_a_slow_phase_multiplies_every_time() -> None:
    network = Network(Upstream(first_token=1, per_token=0.1, output_tokens=11, phases=[Phase(10, 20, 5)]))
    network.begin()
    assert (await send(network)).seconds == pytest.approx(2)
    await anyio.sleep(8)
    assert (await send(network)).seconds == pytest.approx(10)
    assert (await send(network)).seconds == pytest.approx(2)


async def test_times_are_those_of_when_tokens_are_made() -> None:
    network = Network(Upstream(first_token=1, per_token=0.1, output_tokens=11, phases=[Phase(0.5, 9, 5)]))
    assert (await send(network)).seconds == pytest.approx(1 + 5), "it became slow before the first token came"


# Capacity


async def test_beyond_the_knee_what_is_served_shares_what_there_is() -> None:
    network = Network(Upstream(first_token=1, capacity=Sharing(10)))
    assert [each.seconds for each in await together(network, 10)] == pytest.approx([1.0] * 10)
    # The first ten found room, and each later one a little more company.
    later = sorted(each.seconds for each in await together(network, 20))
    assert later == pytest.approx([1.0] * 10 + [1 + n / 10 for n in range(1, 11)])
    assert network.serving["upstream.test"].in_flight_max == 20


async def test_a_slowdown_and_refusals_by_load() -> None:
    capacity = Sharing(10, slowdown=lambda load: 1 + load, refusal_ratio=lambda load: load > 1)
    network = Network(Upstream(first_token=1, capacity=capacity))
    received = await together(network, 11)
    assert sorted(each.status for each in received) == [200] * 10 + [429]
    assert max(each.seconds for each in received) == pytest.approx(2)
    assert network.log[-1].failure == "capacity"


async def test_slots_are_given_in_order_and_the_rest_is_refused() -> None:
    network = Network(Upstream(first_token=1, capacity=Slots(2, max_queued=3), failure_latency=0))
    received = await together(network, 7)
    assert [each.status for each in received] == [503, 503, 200, 200, 200, 200, 200]
    assert [each.seconds for each in received[2:]] == pytest.approx([1, 1, 2, 2, 3])


async def test_who_leaves_the_queue_gives_its_place_on() -> None:
    network = Network(Upstream(first_token=1, capacity=Slots(1)))

    async def impatient() -> None:
        with anyio.move_on_after(0.5):
            await send(network)

    async with anyio.create_task_group() as group:
        group.start_soon(send, network)
        await anyio.sleep(0.1)
        group.start_soon(impatient)
        await anyio.sleep(0.1)
        assert (await send(network)).seconds == pytest.approx(1.8)
    assert [exchange.failure for exchange in network.log] == [None, "abandoned", None]
    assert network.serving["upstream.test"].in_flight == 0


async def test_a_phase_may_take_capacity_away() -> None:
    network = Network(Upstream(first_token=1, capacity=Slots(4), phases=[Phase(10, 20, capacity_factor=0.5)]))
    network.begin()
    assert max(each.seconds for each in await together(network, 4)) == pytest.approx(1)
    await anyio.sleep(9.5)
    assert max(each.seconds for each in await together(network, 4)) == pytest.approx(2)


# Limits


async def test_rate_limits_are_told_and_kept() -> None:
    limits = RateLimits(requests_per_minute=60, tokens_per_minute=100_000, window=1)
    network = Network(Upstream(first_token=0, failure_latency=0, rate_limits=limits))
    first = await send(network)
    assert first.headers["x-ratelimit-limit-requests"] == "60"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await send(network)
    assert (refused.status, refused.headers["retry-after-ms"]) == (429, "1000")
    await anyio.sleep(1)
    assert (await send(network)).status == 200
    assert [exchange.failure for exchange in network.log] == [None, "rate_limit", None]


@pytest.mark.parametrize(("requests", "tokens"), [(300, None), (None, 30_000), (300, 30_000)])
async def test_never_more_is_granted_than_the_capacity_and_what_comes_in_since(
    requests: float | None, tokens: float | None
) -> None:
    limits = RateLimits(requests_per_minute=requests, tokens_per_minute=tokens, window=10)
    network = Network(
        Upstream(
            first_token=Uniform(0, 1), output_tokens=Uniform(1, 300), failure_latency=0, rate_limits=limits
        )
    )
    network.begin(5)
    async with anyio.create_task_group() as group:
        for _ in range(1500):
            group.start_soon(send, network)
            await anyio.sleep(0.05)
    granted = [
        (sent.arrived, 1, sent.input_tokens + sent.output_tokens) for sent in network.log if sent.answered
    ]
    assert 100 < len(granted) < 1500
    for dimension, limit in ((1, requests), (2, tokens)):
        if limit is None:
            continue
        for start, begin in enumerate(granted):
            total = 0.0
            for grant in granted[start:]:
                total += grant[dimension]
                seconds = grant[0] - begin[0]
                assert total <= limit / 60 * (10 + seconds) * (1 + 1e-9)


async def test_a_key_has_limits_and_money_of_its_own() -> None:
    keys = {"a": Key(rate_limits=RateLimits(requests_per_minute=60, window=1)), "b": Key(max_usd=0.002)}
    network = Network(
        Upstream(first_token=0, failure_latency=0, keys=keys, output_tokens=100, output_price=10)
    )
    assert [(await send(network, key="a")).status for _ in range(2)] == [200, 429]
    statuses = [await send(network, key="b") for _ in range(3)]
    assert [each.status for each in statuses] == [200, 200, 429]
    assert statuses[-1].json["error"]["code"] == "insufficient_quota"
    assert (await send(network, key="nobody's")).status == 401


async def test_once_its_money_is_spent_it_is_out_of_quota() -> None:
    network = Network(Upstream(output_tokens=100, output_price=10, max_usd=0.001))
    assert [(await send(network)).status for _ in range(2)] == [200, 429]
    assert network.log[-1].failure == "insufficient_quota"


async def test_a_prompt_that_does_not_fit() -> None:
    network = Network(Upstream(context_window=150))
    assert (await send(network, max_tokens=50)).status == 200
    refused = await send(network, max_tokens=51)
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")


# Clients that go away


@pytest.mark.parametrize(
    ("leave_at", "made"), [(0.5, 0), (1.0 + 0.25, 3), (1.0 + 0.95, 10)], ids=["before", "early", "late"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_made_until_then_is_billed(leave_at: float, made: int, stream: bool) -> None:
    network = Network(
        Upstream(first_token=1, per_token=0.1, output_tokens=11, output_price=1e6, max_events=99)
    )
    with anyio.move_on_after(leave_at):
        reply = await network(request(stream=stream))
        try:
            async for _ in reply.stream:
                pass
        finally:
            await reply.stream.aclose()
    [exchange] = network.log
    assert (exchange.failure, exchange.output_tokens) == ("abandoned", made)
    assert exchange.ended == pytest.approx(leave_at)
    assert exchange.usd == made


# Networks


async def test_upstreams_by_url_and_model() -> None:
    network = Network(
        {
            "https://a.test/v1": {"small": Upstream(first_token=1), "large": Upstream(first_token=5)},
            "https://b.test/v1/": Upstream(first_token=2),
        }
    )
    assert list(network.upstreams) == ["a.test/small", "a.test/large", "b.test"]
    assert (await send(network, url="https://a.test/v1", model="small")).seconds == pytest.approx(1)
    assert (await send(network, url="https://a.test/v1", model="large")).seconds == pytest.approx(5)
    assert (await send(network, url="https://b.test/v1", model="whatever")).seconds == pytest.approx(2)
    assert (await send(network, url="https://a.test/v1", model="none")).status == 404
    there = r"nothing is at https://c.test/v1, .*; upstreams are at https://a.test/v1, https://b.test/v1"
    with pytest.raises(ConfigurationError, match=there):
        await send(network, url="https://c.test/v1")
    with pytest.raises(ConfigurationError, match="not GET"):
        await network(Request("GET", "https://a.test/v1/models", []))
    assert [sent.upstream for sent in network.log] == ["a.test/small", "a.test/large", "b.test"]


async def test_a_new_simulation_knows_nothing_of_the_last() -> None:
    limits = RateLimits(requests_per_minute=60, window=1)
    network = Network(Upstream(first_token=Bimodal(0.1, share=0.5, factor=10), rate_limits=limits))
    runs: list[list[float]] = []
    for _ in range(2):
        network.begin(seed=1)
        runs.append([(await send(network)).status for _ in range(3)])
        log = network.log
        runs.append([round(sent.ended - sent.arrived, 6) for sent in log if sent.ended is not None])
    assert runs[:2] == runs[2:]
    assert 429 in runs[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Upstream(first_token=-1),
        lambda: Upstream(failures={"teapot": 0.1}),  # type: ignore[dict-item]
        lambda: Upstream(failures={"500": 1.5}),
        lambda: Upstream(failures={"500": 0.6, "503": 0.6}),
        lambda: Upstream(max_events=0),
        lambda: Upstream(first_token="x"),  # type: ignore[arg-type]
        lambda: Upstream(keys=["a"]),  # type: ignore[arg-type]
        lambda: Upstream(keys={"a": None}),  # type: ignore[dict-item]
        lambda: Upstream(input_price=-1),
        lambda: Upstream(context_window=0),
        lambda: Upstream(max_usd=0),
        lambda: Key(max_usd=-1),
        lambda: Outage(5, 5),
        lambda: Outage(-1, 5),
        lambda: Outage(1, 5, "teapot"),  # type: ignore[arg-type]
        lambda: Outage(1, 5, share=0),
        lambda: Phase(1, 5, latency_factor=0),
        lambda: Sharing(0),
        lambda: Slots(1, max_queued=-1),
        lambda: Slots(1, refuse_with="reset"),
        lambda: Network({}),
        lambda: Network(Upstream(), read_timeout=0),
        lambda: Network({"https://a.test/v1": Upstream(), "https://a.test": Upstream()}),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError, match=r"allowed are|two of them"):
        make()


async def test_who_leaves_just_when_its_turn_comes_gives_it_on() -> None:
    network = Network(Upstream(first_token=1, capacity=Slots(1)))

    async def impatient() -> None:
        with anyio.move_on_after(1.0):
            await send(network)

    async with anyio.create_task_group() as group:
        for client in (lambda: send(network), impatient, lambda: send(network)):
            group.start_soon(client)
            await anyio.lowlevel.checkpoint()
    assert network.serving["upstream.test"].in_flight == 0
    assert anyio.current_time() <= 3
    assert network.log[-1].answered


async def test_a_failed_reply_ends_once() -> None:
    network = Network(Upstream(failures={"cut": 1.0}))
    reply = await network(request(stream=True))
    with pytest.raises(httpx.RemoteProtocolError):
        await read_into([], reply)
    await reply.stream.aclose()
    await read_into([], reply)
    assert network.log[0].failure == "cut"
    assert network.serving["upstream.test"].in_flight == 0
