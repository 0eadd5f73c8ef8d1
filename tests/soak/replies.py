"""What the soak's clients ask, and what they make of the answer: whole, broken, an error, and whose it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.soak.provider import expected

PROMPT = [{"role": "user", "content": "Count."}]
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": PROMPT}),
    "messages": ("/v1/messages", {"messages": PROMPT, "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "Count."}),
    "embeddings": ("/v1/embeddings", {"input": "Count."}),
}
STREAMED: dict[str, dict[str, Any]] = {
    "chat": {"stream": True, "stream_options": {"include_usage": True}},
    "messages": {"stream": True},
    "responses": {"stream": True},
}


@dataclass(slots=True)
class Got:
    """What became of one request, as its client saw it."""

    id: str
    tenant: str
    kind: str
    what: str = ""
    """ok, error, event (an error within a stream), broken, left; or what is wrong about it."""
    status: int | None = None
    origin: str | None = None
    """Which request of which provider it is the answer to."""


def judge(got: Got, headers: dict[str, str], body: bytes, *, whole: bool) -> None:
    """Say what an answer is; `whole` if it came to its proper end."""
    got.origin = headers.get("x-soak-from")
    if headers.get("x-resilient-llm-request-id") != got.id:
        got.what = f"the answer to {headers.get('x-resilient-llm-request-id')}"
    elif headers.get("x-soak-echo", got.id) != got.id:
        got.what = f"a provider's answer to {headers['x-soak-echo']}"
    elif got.status != 200:
        got.what = "error" if whole and _is_error(body) else f"an error that is none: {body[:200]!r}"
    elif headers.get("content-type", "").startswith("text/event-stream"):
        got.what = _of_stream(got, body, whole=whole)
    elif not whole:
        got.what = "broken"
    else:
        got.what = _of_message(got, body)


def _is_error(body: bytes) -> bool:
    try:
        return bool(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


def _of_message(got: Got, body: bytes) -> str:
    try:
        text = _text(json.loads(body))
    except (ValueError, KeyError, TypeError, IndexError):
        return f"a reply that is none: {body[:200]!r}"
    return "ok" if text is None or text == expected(got.id) else f"another text: {text[:200]!r}"


def _text(message: dict[str, Any]) -> str | None:
    if "choices" in message:
        return str(message["choices"][0]["message"]["content"])
    if "output" in message:
        return str(message["output"][0]["content"][0]["text"])
    if "content" in message:
        return str(message["content"][0]["text"])
    assert message["data"][0]["embedding"]
    return None


def _of_stream(got: Got, body: bytes, *, whole: bool) -> str:
    stream = _Stream()
    for name, data in _events(body):
        if stream.over:
            return f"something behind the end: {data!r}"
        stream.feed(name, data)
    if not expected(got.id).startswith(stream.text):
        return f"another text: {stream.text[:200]!r}"
    if stream.failed:
        return "event"
    if not whole:
        return "broken"
    if not stream.finished:
        return f"a stream without an end: {body[-200:]!r}"
    return "ok" if stream.text == expected(got.id) else f"a part for the whole: {stream.text[:200]!r}"


class _Stream:
    """What the events of a stream say, of whichever API."""

    def __init__(self) -> None:
        self.text = ""
        self.finished = False
        """Whether it said that this was all; the last word may be missing then."""
        self.over = False
        self.failed = False

    def feed(self, name: str, data: str) -> None:
        """Take an event."""
        if data == "[DONE]":
            self.over = True
            return
        event = json.loads(data)
        kind = event.get("type", "")
        if "error" in (kind, name) or "error" in event or kind == "response.failed":
            self.over = self.failed = True
        elif kind in ("message_stop", "response.completed"):
            self.finished = self.over = True
        elif kind == "response.output_text.delta":
            self.text += event["delta"]
        elif kind == "content_block_delta":
            self.text += event["delta"]["text"]
        elif kind == "message_delta":
            self.finished = event["delta"]["stop_reason"] is not None
        elif event.get("choices"):
            (choice,) = event["choices"]
            self.text += choice["delta"].get("content") or ""
            self.finished = self.finished or choice["finish_reason"] is not None


def _events(body: bytes) -> Iterator[tuple[str, str]]:
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "data" in fields:
            yield fields.get("event", ""), fields["data"]
