"""RTY-05: what must not be done twice is not hedged, however long it takes."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from resilient_llm import Hedge, Retry
from resilient_llm.httpx2 import ResilientTransport
from tests.policies.hedging import InTurn
from tests.streams.scripted import Upstream, send

pytestmark = pytest.mark.anyio

API = "http://h.example/v1"
PLAIN = {"model": "m", "input": "hi"}
ANSWERS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    },
    "/embeddings": {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}]},
    "/messages": {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
    },
    "/responses": {
        "id": "r",
        "object": "response",
        "status": "completed",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}],
    },
}


@pytest.mark.parametrize(
    ("path", "body", "attempts"),
    [
        ("/chat/completions", {"model": "m", "messages": []}, 2),
        ("/embeddings", PLAIN, 2),
        ("/messages", {"model": "m", "messages": []}, 2),
        ("/responses", PLAIN | {"store": False}, 2),
        ("/responses", PLAIN | {"store": True}, 1),
        ("/responses", PLAIN | {"background": True}, 1),
        ("/responses", PLAIN | {"conversation": "conv_1"}, 1),
        ("/chat/completions", {"model": "m", "messages": [], "store": True}, 1),
        ("/files", {"purpose": "batch"}, 1),
        ("/batches", {"input_file_id": "file-1"}, 1),
        ("/images/generations", {"model": "m", "prompt": "a cat"}, 1),
        ("/realtime/sessions", {"model": "m"}, 1),
    ],
)
async def test_only_what_does_no_harm_twice_is_hedged(path: str, body: dict[str, Any], attempts: int) -> None:
    upstream = Upstream(lambda: httpx2.Response(200, json=ANSWERS.get(path, {"id": "x"})), delay=5.0)
    transport = ResilientTransport(upstream, policies=[Retry(), Hedge(delay=2.0), InTurn()])
    await send(transport, body, url=API + path)
    assert len(upstream.sent) == attempts


async def test_nor_is_an_upload_that_can_be_read_only_once() -> None:
    async def upload() -> Any:
        yield b'{"model": "m", "messages": []}'

    upstream = Upstream(lambda: httpx2.Response(200, json=ANSWERS["/chat/completions"]), delay=5.0)
    transport = ResilientTransport(upstream, policies=[Retry(max_replay_body=4), Hedge(delay=2.0), InTurn()])
    request = httpx2.Request("POST", f"{API}/chat/completions", content=upload())
    await transport.handle_async_request(request)
    assert len(upstream.sent) == 1
