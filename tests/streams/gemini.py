"""A server that streams as Gemini's API does, and fails as `Fault` says: as much of it as the table of faults needs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from starlette.types import Message, Receive, Scope, Send

from resilient_llm.testing import FakeModel, Fault
from resilient_llm.testing._connection import break_connection


@dataclass
class Asked:
    """One request."""

    model: str
    arrived: float
    body: dict[str, object]


class FakeGemini:
    """Answer `POST /v1beta/models/{model}:streamGenerateContent`."""

    def __init__(self, model: FakeModel, reply: Callable[[Asked], str]) -> None:
        self._model = model
        self._reply = reply
        self._scripts: dict[str, Callable[[], Fault]] = {}
        self.requests: list[Asked] = []

    def script(self, model: str, fault: Callable[[], Fault]) -> None:
        """Choose the faults of a model's requests."""
        self._scripts[model] = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        while (await receive()).get("more_body"):
            pass
        model = scope["path"].rpartition("/")[2].partition(":")[0]
        asked = Asked(model, anyio.current_time(), {})
        self.requests.append(asked)
        fault = self._scripts[model]()
        ending = await self._unless_client_leaves(fault, self._reply(asked), receive, send)
        if ending is not None:
            await break_connection(scope, receive, send, "reset" if ending == "reset" else "close")

    async def _unless_client_leaves(
        self, fault: Fault, reply: str, receive: Receive, send: Send
    ) -> str | None:
        ending: str | None = None

        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            ending = await self._play(fault, reply, _Out(send, fault.chunk_size))
            group.cancel_scope.cancel()
        return ending

    async def _play(self, fault: Fault, reply: str, out: _Out) -> str | None:
        latency = self._model.latency.draw(None)  # type: ignore[arg-type]  # nothing random in it
        await _sleep(latency.headers + fault.delay_headers)
        if fault.reset:
            return "reset"
        if fault.is_answer:
            await out.start(fault.status or 200, "application/json")
            if fault.body != "":
                await out.write(json.dumps(_error(fault) if fault.body is None else fault.body).encode())
            return await out.finish()
        await out.start(200, "text/event-stream")
        if fault.empty_stream:
            return await out.finish()
        tokens = reply.split(" ")
        for index, token in enumerate(tokens):
            if index == fault.interruption:
                return await self._interrupt(fault, out)
            await _sleep(latency.per_token if index else latency.first_token + fault.delay_first_token)
            last = index == len(tokens) - 1
            said = _event(
                token if not index else f" {token}", finish="STOP" if last and not fault.omit_done else None
            )
            await out.write(said[: len(said) // 2] + b"\n\n" if index == fault.malformed_event_at else said)
        return await (out.finish() if fault.interruption is None else self._interrupt(fault, out))

    async def _interrupt(self, fault: Fault, out: _Out) -> str | None:
        if fault.reset_after_tokens is not None:
            return "reset"
        if fault.cut_after_tokens is not None:
            return "close"
        if fault.stall_after_tokens is not None:
            await _sleep(math.inf)
        if fault.error_event_at is not None:
            await out.write(b"data: " + json.dumps(_error(fault)).encode() + b"\n\n")
        return await out.finish()


class _Out:
    def __init__(self, send: Send, chunk_size: int | None) -> None:
        self._send = send
        self._chunk_size = chunk_size

    async def start(self, status: int, kind: str) -> None:
        message: Message = {"type": "http.response.start", "status": status}
        await self._send({**message, "headers": [(b"content-type", kind.encode())]})

    async def write(self, data: bytes) -> None:
        size = self._chunk_size or len(data)
        for start in range(0, len(data), size):
            part = data[start : start + size]
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def finish(self) -> str | None:
        await self._send({"type": "http.response.body", "body": b""})
        return None


async def _sleep(seconds: float) -> None:
    # No pings meanwhile: Gemini sends none, and its SDK takes a comment for a broken event.
    await (anyio.sleep_forever() if seconds == math.inf else anyio.sleep(seconds))


def _event(text: str, finish: str | None) -> bytes:
    candidate: dict[str, object] = {"content": {"parts": [{"text": text}], "role": "model"}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    body = {
        "candidates": [candidate],
        "usageMetadata": {"promptTokenCount": 3, "candidatesTokenCount": 1, "totalTokenCount": 4},
        "modelVersion": "gemini-fake",
        "responseId": "r1",
    }
    return b"data: " + json.dumps(body).encode() + b"\r\n\r\n"


_STATUSES = {400: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}


def _error(fault: Fault) -> dict[str, object]:
    status = fault.status or 500
    return {"error": {"code": status, "message": "no", "status": _STATUSES.get(status, "INTERNAL")}}
