"""How the rest of an answer is asked for, and how it joins on to what was said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resilient_llm.message import Request
from resilient_llm.providers.continuation import continuation_for


def event(body: Any, *, named: bool = True) -> bytes:
    head = f"event: {body['type']}\n" if named and "type" in body else ""
    return f"{head}data: {json.dumps(body)}\n\n".encode()


def request(path: str, body: Any, host: str = "h.example") -> Request:
    headers = [(b"Content-Length", b"7"), (b"idempotency-key", b"k"), (b"x-other", b"1")]
    return Request("POST", f"https://{host}{path}", headers, json.dumps(body).encode())


CHAT = request(
    "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
)
MESSAGES = request(
    "/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
)


def start(index: int, kind: str = "text") -> bytes:
    return event({"type": "content_block_start", "index": index, "content_block": {"type": kind, "text": ""}})


def delta(index: int, text: str) -> bytes:
    return event(
        {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}
    )


def stop(index: int) -> bytes:
    return event({"type": "content_block_stop", "index": index})


BEGUN = event({"type": "message_start", "message": {"id": "msg_2"}})
END = event(
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
) + event({"type": "message_stop"})


def joined(
    first: bytes, text: str, second: bytes, *, asked: Request = MESSAGES, cut: int = 1000
) -> list[Any]:
    """Give the events of the second stream as the caller sees them."""
    continuation = continuation_for(asked)
    assert continuation is not None
    for at in range(0, len(first), cut):
        continuation.listen(first[at : at + cut])
    continuation.request(asked, text, {})
    whole = b"".join(continuation.join(second[at : at + cut]) for at in range(0, len(second), cut))
    found = []
    for block in whole.split(b"\n\n")[:-1]:
        (line,) = [line for line in block.split(b"\n") if line.startswith(b"data: ")]
        found.append(line[6:].decode() if line == b"data: [DONE]" else json.loads(line[6:]))
    return found


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_the_open_block_goes_on(cut: int) -> None:
    first = event({"type": "message_start", "message": {"id": "msg_1"}}) + start(0) + delta(0, "Hello ")
    second = BEGUN + start(0) + event({"type": "ping"}) + delta(0, " wor") + delta(0, "ld ") + stop(0) + END
    events = joined(first, "Hello ", second, cut=cut)
    assert [item["type"] for item in events] == [
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [item["delta"]["text"] for item in events[1:3]] == [
        "wor",
        "ld ",
    ]  # a space was not shown to the model
    assert {item["index"] for item in events[1:4]} == {0}


def test_blocks_are_counted_on() -> None:
    first = start(0, "thinking") + stop(0) + start(1) + delta(1, "Hello")
    second = BEGUN + start(0) + delta(0, "!") + stop(0) + start(1, "tool_use") + stop(1) + END
    events = joined(first, "Hello", second)
    assert [(item["type"], item.get("index")) for item in events[:4]] == [
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_stop", 2),
    ]


def test_a_block_of_another_kind_closes_the_open_one() -> None:
    events = joined(
        start(0) + delta(0, "Hello"), "Hello", BEGUN + start(0, "thinking") + stop(0) + start(1) + stop(1)
    )
    assert [(item["type"], item["index"]) for item in events] == [
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_stop", 2),
    ]


def test_after_a_closed_block_comes_the_next_one() -> None:
    events = joined(
        start(0) + delta(0, "Hello") + stop(0), "Hello", BEGUN + start(0) + delta(0, "!") + stop(0) + END
    )
    assert [(item["type"], item.get("index")) for item in events[:3]] == [
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
    ]


def chunk(name: str, delta: Any, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"id": name, "created": len(name), "choices": [choice], **more})


def test_chunks_are_of_the_first_completion() -> None:
    first = chunk("first", {"role": "assistant", "content": ""}) + chunk("first", {"content": "Hello"})
    second = (
        chunk("the second", {"role": "assistant", "content": ""})
        + b": ping\n\n"
        + chunk("the second", {"role": "assistant", "content": " world"}, model="other")
        + chunk("the second", {}, "stop")
        + event({"id": "the second", "choices": [], "usage": {"total_tokens": 9}})
        + b"data: [DONE]\n\n"
    )
    events = joined(first, "Hello", second, asked=CHAT)
    assert events.pop() == "[DONE]"
    assert [item["id"] for item in events] == ["first"] * 3
    assert [item["created"] for item in events] == [5] * 3
    assert events[0]["choices"][0]["delta"] == {"content": " world"}
    assert events[0]["model"] == "other"  # which has said it
    assert events[1]["choices"][0]["finish_reason"] == "stop"
    assert events[2]["usage"] == {"total_tokens": 9}


@pytest.mark.parametrize(
    ("host", "prefix"), [("h.example", False), ("api.mistral.ai", True), ("api.deepseek.com", True)]
)
def test_what_is_asked(host: str, prefix: bool) -> None:
    asked = request("/v1/chat/completions", CHAT.json, host)
    continuation = continuation_for(asked)
    assert continuation is not None
    again = continuation.request(asked, "Hello world ", {"continue_final_message": True})
    message = {"role": "assistant", "content": "Hello world ", **({"prefix": True} if prefix else {})}
    assert again.json == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}, message],
        "max_tokens": 1,  # at least one more
        "continue_final_message": True,
    }
    assert again.body is not None
    assert again.header(b"content-length") == str(len(again.body)).encode()
    assert again.header(b"idempotency-key") is None  # it is another request
    assert again.header(b"x-other") == b"1"
    assert asked.json == CHAT.json


def test_messages_do_not_begin_with_space_at_their_end() -> None:
    continuation = continuation_for(MESSAGES)
    assert continuation is not None
    again = continuation.request(MESSAGES, "Hello \n", {})
    assert again.json["messages"][-1] == {"role": "assistant", "content": "Hello"}  # type: ignore[index]
    assert again.json["max_tokens"] == 99


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1beta/models/m:streamGenerateContent", {"contents": []}),
        ("/v1/messages/count_tokens", {"messages": []}),
        ("/v1/chat/completions", {}),
    ],
)
def test_where_nothing_can_ask(path: str, body: Any) -> None:
    assert continuation_for(request(path, body)) is None
