"""Tokens of a call, estimated before it is sent."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import (
    Bulkhead,
    Call,
    ConfigurationError,
    CostExceedsCapacityError,
    Pipeline,
    Profile,
    RateLimit,
    RateLimitedError,
    Request,
    Retry,
    Target,
    TokenEstimate,
)
from resilient_llm._loop import EventLoop
from resilient_llm.ordering import Door as DoorName
from resilient_llm.policies.tokens import MOST_TOKENS, estimate_once, forget_estimates
from resilient_llm.telemetry.silent import SILENT
from tests.policies.rate_limiting import Answer, Answers
from tests.support import FAILURE, Door

IMAGE = "data:image/png;base64," + "A" * 100_000


def call(body: object, operation: str = "chat") -> Call:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call(
        Request("POST", "https://api.example/v1", [], content),
        read=lambda _request: Profile(operation=operation),
        target=Target(name="api.example"),
        loop=cast("EventLoop", None),
        telemetry=SILENT,
        started=0.0,
    )


def prompt(body: object, **options: Any) -> int:
    """Give the part of the estimate that is the prompt's."""
    return TokenEstimate(output_tokens=0, **options)(call(body))


def test_a_quarter_of_the_bytes_of_what_is_said() -> None:
    assert prompt({"prompt": "x" * 400}) == 100
    assert prompt({"prompt": "é" * 400}) == 200
    assert prompt({"prompt": "語" * 400}) == 300
    assert prompt({"prompt": "x" * 400}, bytes_per_token=2) == 200


def test_messages_count_with_what_a_provider_adds_to_each() -> None:
    one = prompt({"messages": [{"role": "user", "content": "x" * 400}]})
    two = prompt({"messages": [{"role": "user", "content": "x" * 200}] * 2})
    assert 100 < one <= 107
    assert one < two <= 2 * 57


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "word " * 200}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 200}]}]},
        {"system": "word " * 100, "messages": [{"role": "user", "content": "word " * 100}]},
        {"prompt": ["word " * 100, "word " * 100]},
        {"input": "word " * 200},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "word " * 200}]}]},
        {"instructions": "word " * 200, "input": ""},
        {"contents": [{"parts": [{"text": "word " * 200}]}]},
        {"content": {"parts": [{"text": "word " * 200}]}},
        {"requests": [{"content": {"parts": [{"text": "word " * 200}]}}]},
        {"system_instruction": {"parts": [{"text": "word " * 200}]}, "contents": []},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "word " * 200}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "word " * 200}}]}]},
        {"messages": [], "tools": [{"name": "t", "description": "word " * 200}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {"type": "text", "media_type": "text/plain", "data": "word " * 200},
                        }
                    ],
                }
            ]
        },
    ],
    ids=lambda body: json.dumps(body).replace("word ", "")[:60],
)
def test_prompts_are_found_wherever_a_dialect_puts_them(body: object) -> None:
    assert 250 <= prompt(body) <= 285


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": IMAGE}},
        {"type": "input_image", "image_url": IMAGE},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": IMAGE}},
        {"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}},
        {"inlineData": {"mimeType": "image/png", "data": IMAGE}},
        {"fileData": {"fileUri": "gs://bucket/video"}},
    ],
    ids=lambda part: str(part)[:40],
)
def test_an_attachment_is_a_constant_however_many_bytes_it_has(part: object) -> None:
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "what is this?"}]}]}
    assert 1_000 <= prompt(body) <= 1_020
    assert 20 <= prompt(body, attachment_tokens=20) <= 40


def test_ids_of_tokens_are_tokens() -> None:
    assert prompt({"input": list(range(300))}) == 300
    assert prompt({"prompt": [[1, 2, 3], [4, 5]]}) == 5


@pytest.mark.parametrize(
    ("limits", "output"),
    [
        ({}, 500),
        ({"max_tokens": 70}, 70),
        ({"max_completion_tokens": 80}, 80),
        ({"max_completion_tokens": 80, "max_tokens": 70}, 80),
        ({"max_output_tokens": 90}, 90),
        ({"generationConfig": {"maxOutputTokens": 60}}, 60),
        ({"max_tokens": 70, "n": 3}, 210),
        ({"generationConfig": {"maxOutputTokens": 60, "candidateCount": 2}}, 120),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": None}, 500),
        ({"max_tokens": "many"}, 500),
        ({"max_tokens": -1}, 500),
        ({"max_tokens": True, "n": 0}, 500),
        ({"generationConfig": "none"}, 500),
    ],
)
def test_the_answer_is_what_the_request_allows_it(limits: dict[str, object], output: int) -> None:
    assert TokenEstimate()(call({"prompt": "x" * 400, **limits})) == 100 + output


@pytest.mark.parametrize("operation", ["embeddings", "moderation", "rerank", "count_tokens"])
def test_what_has_no_answer_counts_its_input(operation: str) -> None:
    assert TokenEstimate()(call({"input": "x" * 400}, operation)) == 100


@pytest.mark.parametrize("body", [b"", b"not json", b"[1, 2]", {}, {"model": "m"}, {"messages": []}])
def test_a_request_without_a_prompt_has_no_tokens(body: object) -> None:
    assert TokenEstimate()(call(body)) == 0


def test_any_nesting_is_walked() -> None:
    deep: object = "x" * 400
    for _ in range(900):
        deep = [deep]
    assert prompt({"input": deep}) == 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "source"]) | st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(
    body=st.dictionaries(st.sampled_from(["messages", "input", "max_tokens", "n", "generationConfig"]), JSON)
)
def test_any_json_is_estimated(body: dict[str, object]) -> None:
    assert TokenEstimate()(call(body)) >= 0


def test_an_encoding_counts_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def encode(text: str, *, disallowed_special: object) -> list[int]:
        assert disallowed_special == ()
        texts.append(text)
        return [0] * len(text.split())

    def get_encoding(name: str) -> object:
        if name != "o200k_base":
            raise ValueError(f"Unknown encoding {name}")
        return SimpleNamespace(encode=encode)

    tiktoken = ModuleType("tiktoken")
    tiktoken.get_encoding = get_encoding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)

    estimate = TokenEstimate(encoding="o200k_base", output_tokens=7)
    assert estimate(call({"prompt": "one two three"})) == 3 + 7
    long = estimate(call({"prompt": "12345678 " * 100_000}))
    assert long == pytest.approx(100_000, rel=0.01)
    assert max(map(len, texts)) < 20_000, "megabytes would stop the event loop"
    with pytest.raises(ConfigurationError, match=r"encoding='gpt-9': Unknown"):
        TokenEstimate(encoding="gpt-9")


def test_an_encoding_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ImportError, match=r"resilient-llm\[tiktoken\]"):
        TokenEstimate(encoding="o200k_base")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_token": 0}, "bytes_per_token=0"),
        ({"output_tokens": -1}, "output_tokens=-1"),
        ({"attachment_tokens": 1.5}, "attachment_tokens=1.5"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TokenEstimate(**options)


@pytest.mark.anyio
async def test_it_is_made_once_for_a_call_and_its_attempts() -> None:
    asked: list[Call] = []

    def estimate(attempt: Call) -> float:
        asked.append(attempt)
        return 10

    limits = [
        RateLimit(tokens_per_minute=1e6, estimate=estimate, key=key, name=str(key))
        for key in ("target", "model")  # two policies, three attempts
    ]
    door = Door(Retry(max_attempts=3), *limits, provider=Answers(*[Answer(outcome=FAILURE)] * 2))
    await door()
    assert len(asked) == 1
    assert door.calls[0].tokens == 10


@pytest.mark.parametrize(
    ("door", "who"), [("asgi", "a request at the ASGI door"), ("callable", "a function")]
)
def test_where_there_is_no_prompt_tokens_need_an_estimate_of_ones_own(door: DoorName, who: str) -> None:
    handler = Answers() if door == "asgi" else None
    with pytest.raises(ConfigurationError, match=f"rate_limit: {who} has no prompt .* give estimate="):
        Pipeline([RateLimit(tokens_per_minute=100)], handler, door=door)
    Pipeline([RateLimit(tokens_per_minute=100, estimate=lambda _call: 5)], handler, door=door)
    Pipeline([RateLimit(requests_per_minute=100)], handler, door=door)


@pytest.mark.anyio
async def test_tokens_around_a_function_are_limited_by_the_estimate_given() -> None:
    pipeline = Pipeline([RateLimit(tokens_per_minute=100, max_wait=0, estimate=lambda _call: 60)])
    assert await pipeline.run(lambda: "done") == "done"
    with pytest.raises(RateLimitedError, match="40 of 100 tokens"):
        await pipeline.run(lambda: "never")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "max_tokens": 10**400},
        {"prompt": "x", "max_tokens": 10**200, "n": 10**200},
        {"prompt": "x", "n": 10**400},
    ],
)
def test_an_answer_of_any_size_is_a_finite_estimate(body: object) -> None:
    assert estimate_once(call(body), TokenEstimate()) == MOST_TOKENS


def test_an_estimate_of_ones_own_is_finite_too() -> None:
    assert estimate_once(call({}), lambda _call: 1e300) == MOST_TOKENS


@pytest.mark.anyio
async def test_a_call_that_asks_for_an_absurd_answer_is_refused_and_leaves_nothing_behind() -> None:
    limit = RateLimit(tokens_per_minute=1_000)
    door = Door(limit, provider=Answers())
    with pytest.raises(CostExceedsCapacityError):
        await door(body=json.dumps({"prompt": "x", "max_tokens": 10**400}).encode())
    assert limit.levels(door.calls[0])[0].remaining == 1_000


@pytest.mark.anyio
@pytest.mark.parametrize("dry_run", [False, True])
async def test_each_policy_goes_by_its_own_estimate(dry_run: bool) -> None:
    asked: list[str] = []

    def estimate(call: Call) -> float:
        asked.append(call.request.url)
        return 100

    room = Bulkhead(max_concurrent=1, shared=1, cost="tokens", max_wait=math.inf, dry_run=dry_run)
    limit = RateLimit(tokens_per_minute=600, key=None, window=10, estimate=estimate, max_wait=math.inf)
    pipeline = Pipeline([room, limit])
    done: list[float] = []

    async def work() -> None:
        await anyio.sleep(0.1)
        done.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(pipeline.run, work)
        await anyio.sleep(60)
        assert len(done) == 6  # of 100 tokens each, whoever has waited for a slot and so was estimated before
        tasks.cancel_scope.cancel()
    assert len(asked) <= 20


@pytest.mark.anyio
async def test_estimates_are_kept_for_who_made_them_and_shared_by_equals() -> None:
    one = call({"prompt": "x" * 400, "max_tokens": 10})
    assert [estimate_once(one, TokenEstimate()) for _ in range(2)] == [110, 110]
    times: list[Call] = []

    def own(asking: Call) -> float:
        times.append(asking)
        return 7

    assert [estimate_once(one, own) for _ in range(2)] == [7, 7]
    assert (one.tokens, len(times)) == (110, 1)
    forget_estimates(one)
    assert estimate_once(one, own) == one.tokens == 7
