"""Replies that are kept: which, for how long, who gets them, and what becomes of a store that fails."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
import httpx
import httpx2
import openai
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from resilient_llm import (
    Call,
    ConfigurationError,
    Pipeline,
    Policy,
    Price,
    RateLimit,
    Reply,
    Retry,
    Stream,
    TokenEstimate,
    ambient,
)
from resilient_llm.policies.budget import Budget
from resilient_llm.policies.cache import Cache
from resilient_llm.policies.coalesce import Coalesce
from resilient_llm.policies.reply_store import MemoryReplyStore
from resilient_llm.testing import FakeModel, FakeProvider, Latency
from tests.policies.caching import (
    ASK,
    STREAM,
    STREAMED,
    WHOLE,
    Setting,
    SlowStore,
    answer,
    problem,
    served,
    slow_stream,
)
from tests.signals import Recording
from tests.streams.scripted import ROLE, says, send, streamed
from tests.support import cancel_at_every_await
from tests.telemetry.observed import telemetry_of

pytestmark = [
    pytest.mark.anyio,
    # The SDKs leave generators unfinished after the last event, which trio warns of when they are collected.
    pytest.mark.filterwarnings("ignore:.*<async_generator object:pytest.PytestUnraisableExceptionWarning"),
]


async def test_a_reply_is_given_again_until_its_time_is_over() -> None:
    headers = {
        "x-request-id": "r1",
        "set-cookie": "a=b",
        "x-ratelimit-remaining-requests": "9",
        "retry-after": "1",
    }
    setting = Setting(Cache(ttl=60), lambda: answer(headers=headers))
    first, body = await setting.ask()
    assert served(first) is None
    await anyio.sleep(10.5)
    second, again = await setting.ask()
    assert (served(second), second.status_code, again) == ("hit", 200, body)
    assert second.headers["age"] == "10"
    assert int(second.headers["content-length"]) == len(body)
    assert second.headers["x-request-id"] == "r1"
    assert second.headers["content-type"] == "application/json"
    assert not {"set-cookie", "x-ratelimit-remaining-requests", "retry-after"} & set(second.headers)
    assert setting.sent == 1
    await anyio.sleep(50)
    third, _ = await setting.ask()
    assert (served(third), setting.sent) == (None, 2)
    setting.check_nothing_is_left()


async def test_a_hit_costs_nothing() -> None:
    budget = Budget(usd_per_day=1e9, price=Price(input=1e6, output=1e6))
    limit = RateLimit(tokens_per_minute=1000, estimate=TokenEstimate(output_tokens=400))
    setting = Setting(Cache(), outer=(budget, limit))
    for _ in range(10):  # two estimates would be all there is in a minute
        await setting.ask()
    assert setting.sent == 1
    (level,) = await budget.spent(None)
    assert (level.spent, level.reserved, level.estimated) == (5.0, 0, 0)
    assert [outcome.ok for outcome in setting.calls.ended] == [True] * 10
    assert [call.attempts for call in setting.calls.calls] == [1] + [0] * 9
    assert {call.cost for call in setting.calls.calls} == {0.0}


async def test_a_stream_is_given_again_as_a_stream() -> None:
    setting = Setting(Cache(), slow_stream)
    assert (await setting.ask(STREAMED))[1] == WHOLE
    response, body = await setting.ask(STREAMED)
    assert (served(response), body, response.headers["content-type"]) == ("hit", WHOLE, "text/event-stream")
    whole, _ = await setting.ask(ASK)  # never for one that wants it in one piece
    assert (served(whole), setting.sent) == (None, 2)


@pytest.mark.parametrize("body", [ASK, STREAMED], ids=["whole", "streamed"])
async def test_a_content_encoding_stays(body: Any) -> None:
    plain = WHOLE if body is STREAMED else answer().content
    kind = "text/event-stream" if body is STREAMED else "application/json"
    headers = {"content-encoding": "gzip", "content-type": kind}
    setting = Setting(Cache(), lambda: streamed(gzip.compress(plain), headers=headers))
    async with httpx2.AsyncClient(transport=setting.transport) as client:
        for expected in (None, "hit"):
            response = await client.post("http://h.example/v1/chat/completions", json=body)
            assert (served(response), response.content) == (expected, plain)
    assert setting.sent == 1


@pytest.mark.parametrize(
    ("replies", "body"),
    [
        (lambda: problem(400), ASK),
        (lambda: problem(503), ASK),
        (lambda: httpx2.Response(302, headers={"location": "/"}), ASK),
        (lambda: httpx2.Response(200, json={"error": {"message": "no", "code": "overloaded"}}), ASK),
        (lambda: streamed(*STREAM[:-2], httpx2.ReadError("cut")), STREAMED),
        (lambda: streamed(ROLE, says("Hel")), STREAMED),
        (lambda: answer("x" * 5000), ASK),
        (lambda: streamed(says("x" * 5000), *STREAM), STREAMED),
    ],
    ids=["400", "503", "302", "an error in a 200", "cut", "ends early", "too large", "too large, streamed"],
)
async def test_what_is_not_kept(replies: Any, body: Any) -> None:
    setting = Setting(Cache(max_body=4000), replies)
    for _ in range(2):
        assert served((await setting.ask(body))[0]) is None
    assert setting.sent == 2
    assert len(setting.policy.store) == 0  # type: ignore[union-attr, arg-type]
    setting.check_nothing_is_left()


async def test_a_stream_left_after_its_last_event_is_kept() -> None:
    """As SDKs leave one of HTTP/2: the end of the connection comes later, if at all."""
    setting = Setting(Cache(), lambda: streamed(*STREAM, 1e6))
    response = await send(setting.transport, STREAMED)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    seen = b""
    async for chunk in response.stream:
        seen += chunk
        if b"[DONE]" in seen:
            break
    await response.stream.aclose()
    again, body = await setting.ask(STREAMED)
    assert (served(again), body) == ("hit", WHOLE)


async def test_a_stream_left_before_its_last_event_is_not_kept() -> None:
    setting = Setting(Cache(), lambda: streamed(*STREAM[:3], 1.0, *STREAM[3:]))
    response = await send(setting.transport, STREAMED)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    await response.stream.__aiter__().__anext__()
    await response.stream.aclose()
    assert served((await setting.ask(STREAMED))[0]) is None
    assert setting.sent == 2


async def test_calls_at_the_same_time_make_one_attempt_and_one_look_into_the_store() -> None:
    store = SlowStore()
    setting = Setting(Cache(store=store))
    answers = await setting.together(4)
    assert sorted(str(served(r)) for r, _ in answers) == ["None"] + ["coalesced"] * 3
    assert (setting.sent, store.looked) == (1, 1)
    answers = await setting.together(4)
    assert sorted(str(served(r)) for r, _ in answers) == ["coalesced"] * 3 + ["hit"]
    assert (setting.sent, store.looked) == (1, 2)
    setting.check_nothing_is_left()


async def test_who_comes_while_a_reply_is_put_away_has_it() -> None:
    setting = Setting(Cache(store=SlowStore(delay=0.2)), delay=1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setting.ask)
        await anyio.sleep(1.3)  # 0.2 for the look, 1 for the call, and in the middle of the put
        response, _ = await setting.ask()
    assert (served(response), setting.sent) == ("coalesced", 1)


async def test_who_waits_does_not_wait_for_the_store() -> None:
    setting = Setting(Cache(store=SlowStore(delay=0.2)), delay=1.0)
    ends: list[float] = []

    async def ask() -> None:
        await setting.ask()
        ends.append(anyio.current_time() - began)

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.1)
        tasks.start_soon(ask)
    assert ends == [pytest.approx(1.2), pytest.approx(1.4)]


async def test_without_coalescing_each_makes_its_own() -> None:
    setting = Setting(Cache(coalesce=False))
    await setting.together(3)
    assert setting.sent == 3
    assert served((await setting.ask())[0]) == "hit"
    setting.check_nothing_is_left()


@pytest.mark.parametrize(("share", "sent"), [(False, 3), (True, 1)])
async def test_tenants_and_credentials_are_kept_apart_unless_shared(share: bool, sent: int) -> None:
    setting = Setting(Cache(share=share))
    for tenant, key in [("a", "1"), ("b", "1"), ("a", "2"), ("a", "1"), ("b", "1")]:
        with ambient(tenant=tenant):
            await setting.ask(headers={"authorization": f"Bearer {key}"})
    assert setting.sent == sent


async def test_store_is_bounded() -> None:
    store = MemoryReplyStore(max_size=20_000)
    setting = Setting(Cache(store=store), lambda: answer("x" * 1000), delay=0.0)
    for n in range(50):
        await setting.ask({**ASK, "seed": n})
        assert store.size <= 20_000
    assert 5 < len(store) < 20
    assert served((await setting.ask({**ASK, "seed": 49}))[0]) == "hit"
    assert served((await setting.ask({**ASK, "seed": 0}))[0]) is None


@pytest.mark.parametrize(
    "store", [SlowStore(error=ConnectionError("gone")), SlowStore(delay=1e6)], ids=["fails", "hangs"]
)
async def test_a_store_that_fails_fails_no_call(store: SlowStore, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording()
    setting = Setting(Cache(store=store, store_timeout=0.5), telemetry=telemetry_of(recording))
    began = anyio.current_time()
    for _ in range(3):
        response, _ = await setting.ask()
        assert (response.status_code, served(response)) == (200, None)
    assert anyio.current_time() - began <= 3 * (1 + 2 * 0.5) + 0.001
    assert setting.sent == 3
    assert caplog.text.count("the store of cache failed") == 1
    spans = recording.spans
    for span in spans.named("chat m"):
        assert (
            span.event_names().count("resilient_llm.cache.store_failed") == 1
        )  # the other comes when it has ended
        spans.assert_accounted(span)
    assert len(spans.named("cache")) == 3
    setting.check_nothing_is_left()


async def test_each_outage_of_a_store_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    store = SlowStore()
    setting = Setting(Cache(store=store))
    for error in (ConnectionError("first"), None, ConnectionError("second")):
        store.error = error
        await setting.ask()
        await setting.ask()
    assert caplog.text.count("the store of cache failed") == 2


async def test_what_another_version_has_kept_is_forgotten() -> None:
    class Old(SlowStore):
        async def get(self, key: str) -> tuple[bytes, float] | None:
            assert len(key) < 100
            self.values[key] = b"RLR0 of another version", 1e9
            return await super().get(key)

    store = Old()
    setting = Setting(Cache(store=store, max_body=100))  # which nothing that comes fits into
    response, _ = await setting.ask()
    assert (response.status_code, served(response), store.values) == (200, None, {})


async def test_a_store_in_this_process() -> None:
    store = MemoryReplyStore()
    await store.put("k", b"v", 10.0)
    found = await store.get("k")
    assert found is not None
    assert (found[0], round(found[1], 6)) == (b"v", 10.0)
    await store.delete("k")
    assert (await store.get("k"), len(store), store.size) == (None, 0, 0)


async def test_a_store_of_another_event_loop_is_gone_without() -> None:
    """It is used by a loop that still runs, in another thread."""
    store = MemoryReplyStore()
    setting = Setting(Cache(store=store), delay=0.0)
    await setting.ask()

    async def elsewhere() -> tuple[str | None, int]:
        other = Setting(Cache(store=store), delay=0.0)
        return served((await other.ask())[0]), other.sent

    assert await anyio.to_thread.run_sync(asyncio.run, elsewhere()) == (None, 1)


def test_a_new_event_loop_begins_with_nothing() -> None:
    cache = Cache()

    async def run() -> int:
        setting = Setting(cache, delay=0.0)
        await setting.ask()
        await setting.ask()
        return setting.sent

    assert [asyncio.run(run()), asyncio.run(run())] == [1, 1]


@pytest.mark.parametrize("body", [ASK, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("filled", [False, True], ids=["a miss", "a hit"])
async def test_cancelled_at_every_await(body: Any, filled: bool) -> None:
    setting = Setting(Cache(store=SlowStore()), slow_stream if body is STREAMED else answer)
    if filled:
        await setting.ask(body)

    async def scenario() -> None:
        if not filled:
            setting.policy.store.values.clear()  # type: ignore[union-attr]
        await setting.ask(body)

    async def check() -> None:
        setting.check_nothing_is_left()

    assert await cancel_at_every_await(scenario, check) >= (1 if filled else 3)


async def test_the_trace_says_what_was_served_and_gauges_what_is_kept() -> None:
    recording = Recording()
    setting = Setting(Cache(), telemetry=telemetry_of(recording))
    await setting.ask()
    await setting.ask()
    points = recording.points
    assert points.one("resilient_llm.cache.entries").value == 1
    assert points.one("resilient_llm.cache.size").value > 400
    miss, hit = recording.spans.named("chat m")
    assert miss.event_names() == []
    assert hit.event_names() == ["resilient_llm.cache"]
    assert hit.events[0].attributes == {
        "resilient_llm.limiter.name": "cache",
        "resilient_llm.cache.result": "hit",
    }
    assert (hit.attributes["resilient_llm.outcome"], hit.attributes["resilient_llm.attempts"]) == (
        "success",
        0,
    )


async def test_a_reply_of_a_policys_own_is_kept_too() -> None:
    class Own:
        made = 0

        async def __call__(self, call: Call, call_next: Any) -> Reply:
            self.made += 1
            stream = httpx2.ByteStream(b'{"a": 1}')
            return Reply(200, [(b"content-type", b"application/json")], stream, complete=True)

    own = Own()
    setting = Setting(Cache(), inner=(own,))
    bodies = [(await setting.ask())[1] for _ in range(2)]
    assert (bodies, own.made, setting.sent) == ([b'{"a": 1}'] * 2, 1, 0)


# Real SDKs


@asynccontextmanager
async def openai_client(provider: FakeProvider, *policies: Policy) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = resilient_llm.httpx2.ResilientTransport(provider.httpx2_transport(), policies=policies)
    http = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(api_key="k", base_url="http://fake/v1", http_client=http) as client:
        yield client


HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("policies", [(), (Stream(), Retry())], ids=["alone", "before others"])
async def test_openai(policies: tuple[Policy, ...]) -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    async with openai_client(provider, Cache(), *policies) as client:
        for hit in (None, "hit"):
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=HI, temperature=0
            )
            completion = raw.parse()
            assert completion.choices[0].message.content == "one two three"
            assert completion._request_id == "req_fake000001"
            assert raw.headers.get("x-resilient-llm-cache") == hit
        for _ in range(2):
            stream = await client.chat.completions.create(model="m", messages=HI, temperature=0, stream=True)
            words = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(words) == "one two three"
        for _ in range(2):
            embedded = await client.embeddings.create(model="e", input="hi")
            assert embedded.data[0].embedding
    assert provider.total_requests == 3


async def test_openai_streams_at_the_same_time() -> None:
    provider = FakeProvider(FakeModel(reply="one two three", latency=Latency(headers=1)))
    texts: list[str] = []
    async with openai_client(provider, Coalesce()) as client:
        await client.embeddings.create(
            model="e", input="hi"
        )  # the first time it asks a thread what system this is

        async def ask() -> None:
            stream = await client.chat.completions.create(model="m", messages=HI, temperature=0, stream=True)
            texts.append("".join([c.choices[0].delta.content or "" async for c in stream if c.choices]))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
    assert (texts, provider.total_requests) == (["one two three"] * 3, 2)


async def test_anthropic() -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    transport = resilient_llm.httpx2.ResilientTransport(provider.httpx2_transport(), policies=[Cache()])
    http = httpx2.AsyncClient(transport=transport)
    async with anthropic.AsyncAnthropic(api_key="k", base_url="http://fake", http_client=http) as client:
        options: Any = {"model": "m", "max_tokens": 9, "messages": HI, "extra_body": {"temperature": 0}}
        for _ in range(2):
            message = await client.messages.create(**options)
            assert message.content[0].type == "text"
            assert message.content[0].text == "one two three"
        for _ in range(2):
            async with client.messages.stream(**options) as events:
                assert await events.get_final_text() == "one two three"
    assert provider.total_requests == 2


async def test_httpx() -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    transport = resilient_llm.httpx.ResilientTransport(provider.transport(), policies=[Cache()])
    async with httpx.AsyncClient(transport=transport, base_url="http://fake/v1") as client:
        bodies = []
        for _ in range(2):
            async with client.stream("POST", "/chat/completions", json=STREAMED) as response:
                bodies.append(b"".join([chunk async for chunk in response.aiter_raw()]))
        assert bodies[0] == bodies[1]
        assert response.headers["x-resilient-llm-cache"] == "hit"
    assert provider.total_requests == 1


# What it is made with


def test_options() -> None:
    for options, message in [
        ({"ttl": 0}, "ttl=0: allowed are seconds above 0"),
        ({"ttl": float("inf")}, "ttl=inf"),
        ({"store_timeout": 0}, "store_timeout=0"),
        ({"coalesce": 1}, "coalesce=1: allowed are True and False"),
        ({"max_wait": -1.0}, "max_wait=-1.0"),
        ({"when": 1}, "when=1: allowed are functions"),
        ({"name": ""}, "name=''"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            Cache(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_size=0"):
        MemoryReplyStore(max_size=0)


def test_where_it_may_stand() -> None:
    with pytest.raises(ConfigurationError, match="cache must stand before retry"):
        resilient_llm.httpx2.ResilientTransport(policies=[Retry(), Cache()])
    with pytest.raises(ConfigurationError, match="put it on the transport"):
        Pipeline([Cache()])
