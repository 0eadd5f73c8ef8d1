"""The hash of a conversation: the same while it goes on, another one for another."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.message import Request
from resilient_llm.routing.prefix import prefix_hash

Body = dict[str, Any]

TOOL = {"name": "weather", "description": "Tell the weather", "parameters": {"type": "object"}}


def hashed(body: object, **options: int) -> int:
    return prefix_hash(
        Request("POST", "http://provider.example/v1", [], json.dumps(body).encode()), **options
    )


CHAT: Body = {
    "model": "gpt-4o",
    "tools": [{"type": "function", "function": TOOL}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": "Where?"},
        {"role": "user", "content": "In Lyon."},
    ],
}
RESPONSES: Body = {
    "model": "gpt-4o",
    "instructions": "Be brief.",
    "tools": [{"type": "function", **TOOL}],
    "input": CHAT["messages"][1:],
}
ANTHROPIC: Body = {
    "model": "claude-sonnet-4-5",
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [TOOL],
    "messages": CHAT["messages"][1:],
    "max_tokens": 100,
}
GEMINI: Body = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "tools": [{"functionDeclarations": [TOOL]}],
    "contents": [
        {"role": "user", "parts": [{"text": "What is the weather?"}]},
        {"role": "model", "parts": [{"text": "Where?"}]},
        {"role": "user", "parts": [{"text": "In Lyon."}]},
    ],
}
BEDROCK: Body = {
    "system": [{"text": "Be brief."}],
    "toolConfig": {"tools": [{"toolSpec": TOOL}]},
    "messages": [
        {"role": "user", "content": [{"text": "What is the weather?"}]},
        {"role": "assistant", "content": [{"text": "Where?"}]},
        {"role": "user", "content": [{"text": "In Lyon."}]},
    ],
}
DIALECTS = [
    pytest.param(CHAT, "messages", 1, id="chat"),
    pytest.param(RESPONSES, "input", 0, id="responses"),
    pytest.param(ANTHROPIC, "messages", 0, id="anthropic"),
    pytest.param(GEMINI, "contents", 0, id="gemini"),
    pytest.param(BEDROCK, "messages", 0, id="bedrock"),
]
each_dialect = pytest.mark.parametrize(("body", "turns", "user"), DIALECTS)


@each_dialect
def test_it_stays_the_same_as_the_conversation_goes_on(body: Body, turns: str, user: int) -> None:
    for said in range(user + 1, len(body[turns])):
        assert hashed(body | {turns: body[turns][:said]}) == hashed(body)
    assert hashed(body | {"temperature": 1, "stream": True, "max_tokens": 7, "model": "other"}) == hashed(
        body
    )


@each_dialect
def test_another_beginning_is_another_conversation(body: Body, turns: str, user: int) -> None:
    asked = json.dumps(body)
    for text in ("Be brief.", "What is the weather?", "Tell the weather"):
        assert hashed(json.loads(asked.replace(text, "Something else"))) != hashed(body)
    assert hashed(body | {turns: [*body[turns][:user], body[turns][-1]]}) != hashed(body)


def test_marks_for_a_cache_wander_and_text_may_stand_in_parts() -> None:
    later = deepcopy(ANTHROPIC)
    mark = {"type": "ephemeral"}
    later["messages"][0]["content"] = [
        {"type": "text", "text": "What is the weather?", "cache_control": mark}
    ]
    later["system"] = "Be brief."
    assert hashed(later) == hashed(ANTHROPIC)


def test_a_greeting_of_the_models_does_not_stand_for_the_conversation() -> None:
    def greeted(question: str) -> Body:
        return {
            "messages": [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": question}]
        }

    assert hashed(greeted("Why?")) != hashed(greeted("How?"))


def test_a_long_system_prompt_leaves_room_for_the_question() -> None:
    def asked(system: str, question: str) -> Body:
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}

    long = "x" * 10_000
    assert hashed(asked(long, "Why?")) != hashed(asked(long, "How?"))
    assert hashed(asked(long + "a", "Why?")) == hashed(asked(long + "b", "Why?"))
    assert hashed(asked(long + "a", "Why?"), max_bytes=20_000) != hashed(
        asked(long + "b", "Why?"), max_bytes=20_000
    )


def test_a_name_of_the_conversations_own_counts_instead() -> None:
    named: list[Body] = [
        {"prompt_cache_key": "u-1"},
        {"conversation": "u-1"},
        {"conversation": {"id": "u-1"}},
    ]
    for name in named:
        first, second = ({**name, "input": text} for text in ("Why?", "And then?"))
        assert hashed(first) == hashed(second)
    assert hashed(named[0]) != hashed({"prompt_cache_key": "u-2"})
    assert hashed(named[2]) != hashed({"conversation": {"id": "u-2"}})


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Once upon a time"},
        {"prompt": ["Once upon a time", "More"]},
        {"input": "Once upon a time"},
        {"input": [[1, 2, 3]]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": ["strange", None, 3]},
        {"messages": {"role": "user"}},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"messages": [], "tools": None, "system": None},
        {},
        [],
        "text",
    ],
)
def test_whatever_the_body_it_is_a_number_of_64_bits(body: object) -> None:
    assert 0 <= hashed(body) < 2**64
    assert hashed(body) == hashed(body)


def test_requests_that_say_nothing_are_alike() -> None:
    assert hashed({}) == hashed({"model": "gpt-4o"}) == prefix_hash(Request("GET", "http://x.example", []))


def test_it_is_the_same_in_every_process() -> None:
    assert hashed(CHAT) == 17905022968918170544


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_content_can_be_hashed(content: object) -> None:
    body = {"system": content, "tools": content, "messages": [{"role": "user", "content": content}]}
    assert hashed(body) == hashed(body | {"messages": [*body["messages"], content]})  # type: ignore[misc]
