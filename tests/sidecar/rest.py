"""What real clients ask for and the fake provider does not speak: tools, old completions, files, Gemini's API."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Receive, Scope, Send

from resilient_llm.testing import FakeProvider, Fault

_TOOL_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
_EVENTS = "text/event-stream"


def calls_the_tool(request: Any) -> Fault:
    """Answer with the call of a tool where there are tools and none was called yet; a script of the fake provider."""
    if not request.body.get("tools") or any(turn["role"] == "tool" for turn in request.body["messages"]):
        return Fault()
    head = {"id": "chatcmpl-tool", "created": 1, "model": request.model, "system_fingerprint": "fp"}
    if not request.stream:
        message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [_TOOL_CALL]}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
        return Fault(body={**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    opened = {**_TOOL_CALL, "index": 0, "function": {"name": "weather", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": part}} for part in ('{"ci', 'ty": "Ro', 'me"}')]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [opened]},
        *({"tool_calls": [part]} for part in parts),
        {},
    ]
    chunks = [
        {
            **head,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "tool_calls"}],
        }
        for delta in deltas
    ]
    return Fault(body="".join([*map(_event, chunks), "data: [DONE]\n\n"]), headers={"content-type": _EVENTS})


class Rest:
    """A fake provider, and what else its clients ask for.

    `key` is the one that it takes; it tells by a 401 what others were shown.
    """

    def __init__(self, provider: FakeProvider, key: str) -> None:
        self._provider = provider
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope.get("path", "")
        if not path.endswith(("/completions", "/files", ":generateContent", ":streamGenerateContent")) or (
            path.endswith("/chat/completions")
        ):
            await self._provider(scope, receive, send)
            return
        body = await _read(receive)
        headers = dict(scope["headers"])
        shown = headers.get(b"x-goog-api-key", headers.get(b"authorization", b"").removeprefix(b"Bearer "))
        if shown != self._key.encode():
            await _answer(
                send, {"error": {"code": 401, "message": "not this key", "status": "UNAUTHENTICATED"}}, 401
            )
        elif path.endswith("/completions"):
            await _complete(json.loads(body), send)
        elif path.endswith("/files"):
            await _answer(send, _file(body))
        else:
            await _generate(body, send, stream=path.endswith(":streamGenerateContent"))


async def _complete(asked: dict[str, Any], send: Send) -> None:
    """Answer as the completions API does, before chats."""
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": asked["model"]}
    words = ["Once", " upon", " a", " time"]
    if asked.get("stream"):
        chunks = [{**head, "choices": [_choice(word, None)]} for word in words]
        chunks.append({**head, "choices": [_choice("", "stop")]})
        await _answer(send, [*map(_event, chunks), "data: [DONE]\n\n"])
    else:
        usage = {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
        await _answer(send, {**head, "choices": [_choice("".join(words), "stop")], "usage": usage})


def _choice(text: str, reason: str | None) -> dict[str, object]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}


def _file(body: bytes) -> dict[str, object]:
    """Say of an upload how many bytes came, and a checksum of them."""
    name = f"{len(body)}-{sum(body) % 65521}.jsonl"
    head = {"id": "file-1", "object": "file", "created_at": 1, "purpose": "batch", "status": "processed"}
    return {**head, "bytes": len(body), "filename": name}


async def _generate(body: bytes, send: Send, *, stream: bool) -> None:
    """Answer as Gemini does."""
    if b"too much" in body:
        error = {"code": 429, "message": "Resource has been exhausted", "status": "RESOURCE_EXHAUSTED"}
        await _answer(send, {"error": error}, 429)
    elif stream:
        await _answer(send, [_event(_candidate("Once", None)), _event(_candidate(" upon a time", "STOP"))])
    else:
        await _answer(send, _candidate("Once upon a time", "STOP"))


def _candidate(text: str, reason: str | None) -> dict[str, object]:
    candidate: dict[str, object] = {"content": {"parts": [{"text": text}], "role": "model"}, "index": 0}
    if reason is not None:
        candidate["finishReason"] = reason
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 4, "totalTokenCount": 5}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "fake", "responseId": "r"}


def _event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Send, content: object, status: int = 200) -> None:
    """Send an object as JSON, or a list of events one by one."""
    kind = _EVENTS if isinstance(content, list) else "application/json"
    parts = content if isinstance(content, list) else [json.dumps(content)]
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}
    )
    for part in parts:
        await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})
