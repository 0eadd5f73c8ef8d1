"""Go on with an answer that broke off: how to ask for the rest of it, and how that joins on to what was said.

The model is shown the beginning of its own answer as the last message (assistant prefill). Whether a target takes
that, and whether it should be asked, is for whoever configures it to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol, cast

from resilient_llm.core.sse import DEFAULT_MAX_EVENT_SIZE, Event, SSEParser, encode
from resilient_llm.location import locate
from resilient_llm.message import JSONObject, Request
from resilient_llm.providers.answer import CHARACTERS_PER_TOKEN, objects
from resilient_llm.providers.event_reader import parse_data

__all__ = ["Continuation", "continuation_for"]

_PREFIX = frozenset({"deepseek", "mistral_ai"})
"""Providers that go on from an assistant's message only if it is marked as the beginning of theirs."""

_LIMITS = ("max_tokens", "max_completion_tokens")


class Continuation(Protocol):
    """Make one stream of two: `listen` to the first, ask for the rest with `request`, and `join` that on."""

    def listen(self, data: bytes) -> None:
        """Take bytes of the first stream that are passed on."""
        ...

    def request(self, request: Request, text: str, fields: JSONObject) -> Request:
        """Ask for what comes after `text`; `fields` are what a server wants to be told besides."""
        ...

    def join(self, data: bytes) -> bytes:
        """Give the events in the next bytes of the second stream as such of the first, without what that has said."""
        ...


def continuation_for(
    request: Request, *, max_event_size: int = DEFAULT_MAX_EVENT_SIZE
) -> Continuation | None:
    """Give what goes on with the answer to a request; `None` for APIs in which nothing can ask for that.

    Neither stream may have events larger than `max_event_size` bytes: whoever passes them on has seen to that.
    """
    if request.json.get("messages") is None:
        return None
    path = locate(request.url).path
    if path.endswith("/chat/completions"):
        return _ChatContinuation(max_event_size)
    if path.endswith("/v1/messages"):
        return _MessagesContinuation(max_event_size)
    return None


class _ChatContinuation:
    """OpenAI's chat completions and what is compatible with them: chunks of one id, in which nobody speaks twice."""

    def __init__(self, max_event_size: int) -> None:
        self._first = SSEParser(max_event_size=max_event_size)
        self._second = SSEParser(max_event_size=max_event_size)
        self._names: dict[str, object] = {}

    def listen(self, data: bytes) -> None:
        if self._names:
            return
        for event in self._first.feed(data):
            body = _object(event)
            self._names = {name: body[name] for name in ("id", "created") if body.get(name)}

    def request(self, request: Request, text: str, fields: JSONObject) -> Request:
        message: dict[str, object] = {"role": "assistant", "content": text}
        if locate(request.url).provider in _PREFIX:
            message["prefix"] = True
        return _asking(request, message, text, fields)

    def join(self, data: bytes) -> bytes:
        return b"".join(map(self._join, self._second.feed(data)))

    def _join(self, event: Event) -> bytes:
        body = _object(event)
        if not body:
            return encode(event.data)
        choices = [_silenced(choice) for choice in objects(body.get("choices"))]
        if choices and not any(map(_says, choices)) and not body.get("usage"):
            return b""
        return encode(_written({**body, **self._names, "choices": choices}))


class _MessagesContinuation:
    """Anthropic's messages: one message of numbered blocks, of which the last may be open."""

    def __init__(self, max_event_size: int) -> None:
        self._first = SSEParser(max_event_size=max_event_size)
        self._second = SSEParser(max_event_size=max_event_size)
        self._last = -1
        """The number of the last block of the first stream."""
        self._open = False
        self._base = 0
        """What the numbers of the second stream's blocks are counted from."""
        self._trimmed = False

    def listen(self, data: bytes) -> None:
        for event in self._first.feed(data):
            if event.event == "content_block_start":
                self._last += 1
                self._open = True
            elif event.event == "content_block_stop":
                self._open = False

    def request(self, request: Request, text: str, fields: JSONObject) -> Request:
        # The API refuses a beginning that ends in space; so the rest must not begin with it.
        beginning = text.rstrip()
        self._trimmed = beginning != text
        self._base = self._last if self._open else self._last + 1
        return _asking(request, {"role": "assistant", "content": beginning}, text, fields)

    def join(self, data: bytes) -> bytes:
        return b"".join(map(self._join, self._second.feed(data)))

    def _join(self, event: Event) -> bytes:
        body = dict(_object(event))
        if event.event == "message_start":
            return b""
        closing = b""
        if event.event == "content_block_start" and self._open:
            self._open = False
            block = body.get("content_block")
            if isinstance(block, Mapping) and block.get("type") == "text":
                return b""
            stop = {"type": "content_block_stop", "index": self._last}
            closing = encode(_written(stop), event="content_block_stop")
            self._base += 1
        index = body.get("index")
        if isinstance(index, int):
            body["index"] = index + self._base
        delta = body.get("delta")
        if self._trimmed and isinstance(delta, Mapping) and isinstance(delta.get("text"), str):
            text = delta["text"].lstrip()
            body["delta"] = {**delta, "text": text}
            self._trimmed = not text
        return closing + encode(_written(body) if body else event.data, event=event.event)


def _asking(request: Request, message: JSONObject, text: str, fields: JSONObject) -> Request:
    body = dict(request.json)
    messages = body["messages"]
    body["messages"] = [*(messages if isinstance(messages, list) else []), message]
    for name in _LIMITS:
        limit = body.get(name)
        if isinstance(limit, int):
            body[name] = max(1, limit - len(text) // CHARACTERS_PER_TOKEN)
    written = json.dumps({**body, **fields}).encode()
    return request.with_body(written, dropped=(b"idempotency-key",))


def _object(event: Event) -> JSONObject:
    body = parse_data(event.data)
    return cast("JSONObject", body) if isinstance(body, dict) else {}


def _written(body: JSONObject) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _silenced(choice: JSONObject) -> JSONObject:
    """Take out of a choice who speaks: that was said."""
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return choice
    return {**choice, "delta": {name: value for name, value in delta.items() if name != "role"}}


def _says(choice: JSONObject) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("finish_reason")) or (isinstance(delta, Mapping) and any(delta.values()))
