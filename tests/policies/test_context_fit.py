"""ContextFit: prompts made to fit in every dialect, moved to a larger model, or refused."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm import (
    Call,
    ConfigurationError,
    ContextWindowError,
    Pipeline,
    RateLimit,
    Router,
    Target,
    Telemetry,
    TokenEstimate,
)
from resilient_llm.httpx import ResilientTransport
from resilient_llm.policies._conversation import describe, find
from resilient_llm.policies.context_fit import ContextFit
from resilient_llm.testing import FakeProvider, run_virtual
from tests.signals import Recording
from tests.support import Door, Provider

pytestmark = pytest.mark.anyio

LONG = "x" * 400  # 100 tokens


def user(text: object = LONG, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: object = LONG, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


async def sent(
    fit: ContextFit, body: object, *, model: str = "gpt-4o", telemetry: Telemetry | None = None
) -> Call:
    """Give the attempt as it got to the provider."""
    provider = Provider()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    await Door(fit, provider=provider, telemetry=telemetry)(body=content, model=model)
    ((_, attempt),) = provider.attempts
    return attempt


def fit(window: Any = 500, **options: Any) -> ContextFit:
    return ContextFit(**{"window": window, "output_tokens": 0, "granularity_ratio": 0, **options})


async def test_a_prompt_that_fits_is_not_touched() -> None:
    body = b'{ "messages": [ {"role": "user", "content": "hi"} ] }'
    attempt = await sent(fit(), body)
    assert attempt.request.body is body


async def test_the_oldest_exchanges_go_and_every_other_byte_stays() -> None:
    old = json.dumps(user(LONG + "é")) + " ,\n " + json.dumps(assistant())
    start = '{"temperature": 1.0e0,\n "messages": [ {"role":"system","content":"be\\u0020brief"}'
    rest = ', {"role": "user",  "content": "what\\/now"} ] , "model": "gpt-4o" }'
    recent = ",\n" + json.dumps(user()) + "," + json.dumps(assistant())
    attempt = await sent(fit(400), f"{start}, {old}{recent}{rest}".encode())
    assert attempt.request.body == f"{start}{recent}{rest}".encode()
    assert dict(attempt.request.headers) == {b"content-length": str(len(f"{start}{recent}{rest}")).encode()}


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "openai": (
        {
            "messages": [
                {"role": "system", "content": "s"},
                user(),
                assistant(),
                {"role": "developer", "content": "d"},
                user(),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"arguments": LONG}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": LONG}]},
                assistant(),
                user(),
            ]
        },
        [0, 3, 8],
    ),
    "openai, as it once was": (
        {
            "messages": [
                user(),
                {"role": "assistant", "function_call": {"name": "f", "arguments": LONG}},
                {"role": "function", "name": "f", "content": LONG},
                user(),
            ]
        },
        [3],
    ),
    "anthropic": (
        {
            "system": "be brief",
            "messages": [
                user(),
                assistant(
                    [{"type": "thinking", "thinking": LONG}, {"type": "tool_use", "id": "1", "input": {}}]
                ),
                user([{"type": "tool_result", "tool_use_id": "1", "content": LONG}]),
                assistant(),
                user([{"type": "text", "text": LONG}]),
            ],
        },
        [4],
    ),
    "anthropic, an agent at work": (
        {
            "messages": [
                user("do it"),
                assistant([{"type": "tool_use", "id": "1", "input": {}}]),
                user([{"type": "tool_result", "tool_use_id": "1", "content": LONG * 3}]),
                assistant([{"type": "tool_use", "id": "2", "input": {}}]),
                user([{"type": "tool_result", "tool_use_id": "2", "content": LONG}]),
            ]
        },
        [0, 3, 4],
    ),
    "anthropic, words beside a result": (
        {
            "messages": [
                user("do it"),
                assistant([{"type": "tool_use", "id": "1", "input": {}}]),
                user([{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "no, stop"}]),
                assistant([{"type": "tool_use", "id": "2", "input": {"path": LONG * 4}}]),
                user([{"type": "tool_result", "tool_use_id": "2"}]),
                assistant("still"),
            ]
        },
        [0, 1, 2, 5],
    ),
    "gemini": (
        {
            "systemInstruction": {"parts": [{"text": "be brief"}]},
            "contents": [
                {"role": "user", "parts": [{"text": LONG}]},
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": LONG}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"x": LONG}}}]},
                {"role": "model", "parts": [{"text": LONG}]},
                {"parts": [{"text": LONG}]},
            ],
        },
        [4],
    ),
    "responses": (
        {
            "instructions": "be brief",
            "input": [
                user(),
                {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": LONG}]},
                {"type": "function_call", "id": "fc", "call_id": "1", "arguments": LONG},
                {"type": "function_call_output", "id": "fo", "call_id": "1", "output": LONG},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": LONG}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]},
            ],
        },
        [5],
    ),
    "responses, an agent at work": (
        {
            "input": [
                user("do it"),
                {"type": "reasoning", "id": "rs", "summary": []},
                {"type": "function_call", "id": "fc", "call_id": "1", "arguments": LONG},
                {"type": "custom_tool_call", "id": "ct", "call_id": "2", "input": LONG},
                {"type": "custom_tool_call_output", "call_id": "2", "output": LONG},
                {"type": "function_call_output", "call_id": "1", "output": LONG},
                {"type": "reasoning", "id": "rs2", "summary": []},
                {"type": "mcp_approval_request", "id": "ar"},
                {"type": "mcp_approval_response", "approval_request_id": "ar"},
            ],
        },
        [0, 6, 7, 8],
    ),
    "bedrock": (
        {
            "messages": [
                user([{"text": LONG}]),
                assistant([{"toolUse": {"toolUseId": "1", "input": {"x": LONG}}}]),
                user([{"toolResult": {"toolUseId": "1", "content": [{"text": LONG}]}}]),
                assistant([{"text": LONG}]),
                user([{"text": LONG}]),
            ]
        },
        [4],
    ),
}


@pytest.mark.parametrize(("body", "left"), CONVERSATIONS.values(), ids=CONVERSATIONS)
async def test_calls_stay_with_their_results_in_every_dialect(body: dict[str, Any], left: list[int]) -> None:
    place, messages = find(body) or ("", [])
    attempt = await sent(fit(250), body)
    assert attempt.request.json == {**body, place: [messages[index] for index in left]}


async def test_what_nobody_knows_stays_where_it_is() -> None:
    strange = [
        "text",
        None,
        {"type": "item_reference", "id": "x"},
        {"role": "critic"},
        {"type": "compaction"},
        {},
    ]
    body = {"input": [*strange, user(), assistant(), user()]}
    attempt = await sent(fit(200), body)
    assert attempt.request.json == {"input": [*strange, user()]}


async def test_it_trims_in_steps_so_that_prompt_caches_find_the_beginning_again() -> None:
    policy = fit(2_000, granularity_ratio=0.25)
    begins = []
    for exchanges in range(8, 20):
        messages = [m for number in range(exchanges) for m in (user(f"{number} {LONG}"), assistant())]
        attempt = await sent(policy, {"messages": [*messages, user("now")]})
        begins.append(attempt.request.json["messages"][0]["content"].split()[0])  # type: ignore[index]
    assert begins == ["0", "0", "3", "3", "5", "5", "5", "8", "8", "10", "10", "12"]


async def test_the_answer_needs_room_too() -> None:
    body: dict[str, Any] = {"messages": [user(), assistant(), user()]}
    policy = fit(500, output_tokens=100)
    assert len((await sent(policy, body)).request.json["messages"]) == 3  # type: ignore[arg-type]
    for limit in ({"max_tokens": 300}, {"generationConfig": {"maxOutputTokens": 300}}):
        assert len((await sent(policy, {**body, **limit})).request.json["messages"]) == 1  # type: ignore[arg-type]
    assert len((await sent(fit(500, output_tokens=300), body)).request.json["messages"]) == 1  # type: ignore[arg-type]


async def test_what_cannot_be_made_to_fit_is_refused_with_what_to_do() -> None:
    recording = Recording()
    telemetry = Telemetry(tracer_provider=recording.tracer_provider, meter_provider=recording.meter_provider)
    with pytest.raises(ContextWindowError) as refused:
        await sent(
            fit(150, output_tokens=10),
            {"messages": [user(), assistant(), user(LONG * 2)]},
            telemetry=telemetry,
        )
    assert re.fullmatch(
        r"the prompt has about \d+ tokens and the answer may have 10, together more than the 150 of gpt-4o's context "
        r"window, and trimming does not help: shorten the prompt, ask for a shorter answer, or use a model with a "
        r"larger window",
        str(refused.value),
    )
    assert (refused.value.status, refused.value.name, refused.value.retry_after) == (400, "context_fit", None)
    assert recording.points.one("resilient_llm.rejections", reason="context_length_exceeded").value == 1


async def test_with_refuse_nothing_is_trimmed() -> None:
    with pytest.raises(ContextWindowError, match=r"context window: shorten the prompt"):
        await sent(fit(200, on_overflow="refuse"), {"messages": [user(), assistant(), user()]})


WINDOWS = {"gpt-4o": 300, "large": 1_000, "larger": 5_000, "gpt-4.1": 300}


async def test_it_moves_to_the_first_model_with_the_room() -> None:
    recording = Recording()
    telemetry = Telemetry(tracer_provider=recording.tracer_provider)
    policy = fit(window=WINDOWS, on_overflow="move", larger=["large", "larger"])
    for messages, model in ((1, None), (5, "large"), (20, "larger")):
        provider = Provider()
        door = Door(policy, provider=provider, telemetry=telemetry)
        body = json.dumps({"messages": [user()] * messages}).encode()
        await door(body=body)
        assert (door.calls[0].logical_model, provider.attempts[0][1].request.body) == (model, body)
        door.calls[0].finish(door.calls[0].outcome)  # type: ignore[arg-type]
    moved = [event.attributes for span in recording.spans for event in span.events if "context" in event.name]
    assert [attributes["resilient_llm.route.selected"] for attributes in moved] == ["large", "larger"]
    assert moved[0]["resilient_llm.route.from"] == "gpt-4o"
    with pytest.raises(ContextWindowError, match=r"and any of large, larger does not help"):
        await sent(policy, {"messages": [user()] * 100})


async def test_the_model_that_routing_has_chosen_is_what_counts() -> None:
    class Chosen:
        async def __call__(self, call: Call, call_next: Callable[[Call], Any]) -> Any:
            call.logical_model = "larger"
            return await call_next(call)

    provider = Provider()
    body = json.dumps({"messages": [user(), assistant()] * 5}).encode()
    await Door(Chosen(), fit(window=WINDOWS), provider=provider)(body=body)
    assert provider.attempts[0][1].request.body is body


async def test_the_first_thing_that_helps_is_done() -> None:
    both = fit(window=WINDOWS, on_overflow=("trim", "move"), larger=["larger"])
    trimmed = await sent(both, {"messages": [user(), assistant(), user()] * 2})
    assert len(trimmed.request.json["messages"]) < 6  # type: ignore[arg-type]
    too_long = {"messages": [user(), assistant(), user(LONG * 5)]}
    moved = await sent(both, too_long)
    assert moved.request.json == too_long
    assert moved.parent is not None
    assert moved.parent.logical_model == "larger"
    move_first = fit(window=WINDOWS, on_overflow=("move", "trim"), larger=["large"])
    assert (await sent(move_first, {"messages": [user()] * 4})).parent.logical_model == "large"  # type: ignore[union-attr]
    trimmed = await sent(move_first, {"messages": [*[user(), assistant()] * 9, user()]})
    assert trimmed.parent.logical_model is None  # type: ignore[union-attr]
    assert len(trimmed.request.json["messages"]) <= 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "window", [{"other": 10}, lambda _: None, lambda _: 0, lambda _: True, lambda _: 1 / 0]
)
async def test_a_model_whose_window_nobody_knows_is_left_alone(window: Any) -> None:
    body = json.dumps({"messages": [user(), assistant(), user()]}).encode()
    assert (await sent(fit(window=window), body)).request.body is body


async def test_a_function_may_say_how_large_windows_are() -> None:
    def window(call: Call) -> int | None:
        return WINDOWS.get(call.logical_model or call.profile.model or "")

    policy = fit(window=window, on_overflow="move", larger=["unknown", "large"])
    assert (await sent(policy, {"messages": [user()] * 5})).parent.logical_model == "large"  # type: ignore[union-attr]
    with pytest.raises(ContextWindowError):
        await sent(policy, {"messages": [user()] * 50})


async def test_a_router_says_how_large_the_windows_of_its_models_are() -> None:
    router = Router(
        {
            "small": Target(name="a", url="http://a.example", context_window=300),
            "large": Target(name="b", url="http://b.example", context_window=1_000),
            "unknown": Target(name="c", url="http://c.example"),
        }
    )
    policy = fit(window=router, on_overflow=("move", "trim"), larger=["unknown", "large"])
    assert (await sent(policy, {"messages": [user()] * 5}, model="small")).parent.logical_model == "large"  # type: ignore[union-attr]
    assert (await sent(policy, {"messages": [user()] * 50}, model="unknown")).parent.logical_model is None  # type: ignore[union-attr]
    trimmed = await sent(policy, {"messages": [*[user(), assistant()] * 9, user()]}, model="small")
    assert len(trimmed.request.json["messages"]) <= 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        {"input": [user(), assistant(), user()], "truncation": "auto"},
        [user()] * 9,
        b"\x00" + json.dumps({"messages": [user()] * 9}).encode(),
        {"voice": LONG * 9},
        {},
    ],
)
async def test_what_is_not_ours_to_trim_passes(body: object) -> None:
    await sent(fit(100), body)


async def test_an_upload_that_can_be_read_once_passes() -> None:
    provider = Provider()
    await Door(fit(10), provider=provider)(body=None)
    assert len(provider.attempts) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"input": LONG},
        {"messages": [user()]},
        json.dumps({"messages": [user(), assistant(), user()]}).encode("utf-16-le"),
    ],
)
async def test_what_cannot_be_trimmed_is_refused(body: object) -> None:
    with pytest.raises(ContextWindowError):
        await sent(fit(60), body)


async def test_a_body_in_another_encoding_is_not_trimmed() -> None:
    body = json.dumps({"messages": [user(), assistant(), user()]})
    assert len((await sent(fit(250), body.encode())).request.json["messages"]) == 1  # type: ignore[arg-type]
    with pytest.raises(ContextWindowError):
        await sent(fit(250), body.encode("utf-16-le"))


async def test_embeddings_are_not_a_conversation() -> None:
    provider = FakeProvider()
    transport = ResilientTransport(provider.transport(), policies=[fit(100)])
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1") as client:
        body = {"model": "e", "input": [LONG] * 5}
        assert (await client.post("/embeddings", json=body)).status_code == 200
        chat = {"model": "e", "messages": [user()]}
        refused = await client.post("/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.headers["x-should-retry"] == "false"


async def test_a_signed_body_is_not_changed() -> None:
    class Signed:
        async def __call__(self, call: Call, call_next: Callable[[Call], Any]) -> Any:
            call.request = call.request.replace(
                headers=[(b"Authorization", b"AWS4-HMAC-SHA256 Credential=x")]
            )
            return await call_next(call)

    with pytest.raises(ContextWindowError):
        await Door(Signed(), fit(200), provider=Provider())(
            body=json.dumps({"messages": [user(), assistant(), user()]}).encode()
        )


async def test_limits_below_count_what_is_left() -> None:
    provider = Provider()
    limit = RateLimit(tokens_per_minute=100_000, estimate=TokenEstimate(output_tokens=0))
    door = Door(limit, fit(250), provider=provider)
    await door(body=json.dumps({"messages": [user(), assistant(), user()]}).encode())
    assert provider.attempts[0][1].tokens is None


async def test_the_span_says_what_was_taken_out() -> None:
    recording = Recording()
    telemetry = Telemetry(tracer_provider=recording.tracer_provider)
    await sent(fit(250), {"messages": [user(), assistant(), user()]}, telemetry=telemetry)
    (event,) = [event for span in recording.spans for event in span.events]
    assert event.name == "resilient_llm.context.trimmed"
    assert event.attributes["resilient_llm.context.window"] == 250
    assert event.attributes["resilient_llm.context.removed_messages"] == 2
    tokens, removed = (
        event.attributes[f"resilient_llm.context.{name}"] for name in ("tokens", "removed_tokens")
    )
    assert isinstance(tokens, int)
    assert isinstance(removed, int)
    assert (tokens, removed) == (316, 211)


class _Words:
    """A stand-in for tiktoken, which fetches its encodings from the network: one token a word."""

    def encode(self, text: str, **_options: object) -> list[str]:
        return text.split()


@pytest.fixture
def tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tiktoken")
    module.get_encoding = lambda _name: _Words()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tiktoken", module)


@pytest.mark.usefixtures("tiktoken")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tokens_are_counted_with_an_encoding_message_by_message(anyio_backend: str) -> None:
    policy = fit(50_000, estimate=TokenEstimate(encoding="words"))
    body = {"messages": [user("a " * 20_000), assistant("x" * 100_000), user("a " * 29_000)]}
    assert len((await sent(policy, body)).request.json["messages"]) == 3  # type: ignore[arg-type]
    body = {"messages": [user("a " * 20_000), assistant("a " * 1_500), user("a " * 29_000)]}
    assert len((await sent(policy, body)).request.json["messages"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"window=0: allowed are whole numbers from 1"),
        ({"window": True}, r"window=True"),
        ({"window": "1"}, r"window='1'"),
        ({"window": {}}, r"window={}"),
        ({"window": {"m": 0}}, r"window\['m'\]=0: allowed are whole numbers from 1"),
        ({"on_overflow": "drop"}, r"on_overflow='drop': allowed are 'trim', 'move', 'refuse'"),
        ({"on_overflow": ()}, r"on_overflow=\(\)"),
        ({"on_overflow": "move"}, r"larger=\(\): on_overflow='move' needs models to move to"),
        ({"larger": ["m"]}, r"larger=\['m'\]: on_overflow='move'"),
        ({"on_overflow": "move", "larger": "m"}, r"larger='m': allowed are lists"),
        ({"on_overflow": "move", "larger": [""]}, r"larger=\[''\]: allowed are lists"),
        ({"on_overflow": "move", "larger": ["m"]}, r"window=500: to move, give the window of each model"),
        ({"on_overflow": "move", "larger": ["m"], "window": {"n": 1}}, r"does not say how large \['m'\] are"),
        ({"output_tokens": -1}, r"output_tokens=-1"),
        ({"granularity_ratio": 1.1}, r"granularity_ratio=1.1"),
        ({"estimate": len}, r"estimate=.*: allowed are TokenEstimate objects"),
        ({"name": ""}, r"name=''"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(**options)


def test_it_stands_before_what_repeats_calls() -> None:
    description = Pipeline([fit()]).describe().policies[0]
    assert (description.name, description.level) == ("context_fit", "call")
    assert description.options["window"] == 500
    assert Pipeline([fit()], door="client")
    with pytest.raises(ConfigurationError, match="no meaning at the ASGI door"):
        Pipeline([fit()], door="asgi")


def test_a_larger_model_that_the_router_does_not_know_is_found_when_the_pipeline_is_made() -> None:
    moving = fit({"m": 500, "large": 1000}, on_overflow="move", larger=["large"])
    with pytest.raises(ConfigurationError, match="larger='large': the Router has no targets for it"):
        Pipeline([moving, Router({"m": Target(name="m")})], door="client")
    assert Pipeline([moving, Router({"m": Target(name="m"), "large": Target(name="l")})], door="client")


TEXTS = st.integers(1, 60).map(lambda length: "w " * length)
TURNS = st.lists(
    st.one_of(
        st.builds(user, TEXTS),
        st.builds(assistant, TEXTS),
        st.just({"role": "system", "content": "s"}),
        TEXTS.map(lambda text: {"role": "tool", "tool_call_id": "1", "content": text}),
        TEXTS.map(
            lambda text: {"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": text}}]}
        ),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60)
@given(TURNS, st.integers(20, 300), st.sampled_from([0, 0.3]))
def test_what_is_sent_fits_and_fits_again(messages: list[Any], window: int, ratio: float) -> None:
    policy = fit(window, granularity_ratio=ratio)

    async def example() -> None:
        try:
            once = (await sent(policy, {"messages": messages})).request
        except ContextWindowError:
            return
        left = once.json["messages"]
        assert isinstance(left, list)
        assert sum(policy.estimate.of({"messages": [message]}) for message in left) <= window
        positions = iter(messages)
        assert all(any(message == other for other in positions) for message in left), "in order"
        assert [m for m in left if m["role"] == "system"] == [m for m in messages if m["role"] == "system"]
        assert (await sent(policy, once.body)).request.body == once.body

    run_virtual(example)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "type", "content", "parts", "tool_calls", "id", "functionCall", "x"])
            | st.text(max_size=3),
            inner | st.sampled_from(["user", "assistant", "tool", "function_call", "tool_result"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON)
def test_no_message_is_too_odd_to_be_read(one: object, other: object) -> None:
    body: Mapping[str, object] = {"messages": one, "input": other}
    found = find(body)
    for message in found[1] if found else [one, other]:
        assert describe(message, 3).tokens == 3
    assert math.isfinite(TokenEstimate().of(body))
