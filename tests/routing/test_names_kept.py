"""What callers call a model, and where they ask, is theirs: nothing of any length is kept of it."""

from __future__ import annotations

import gc
import json
import tracemalloc

import httpx
import pytest

from resilient_llm import Budget, Retry, Router, Target
from resilient_llm.call import Policy
from resilient_llm.httpx import ResilientTransport

pytestmark = pytest.mark.anyio

LENGTH = 200_000


def answer(request: httpx.Request) -> httpx.Response:
    model = json.loads(request.content)["model"]
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return httpx.Response(
        200, json={"id": "x", "model": model, "choices": [choice], "content": [{"text": "hi"}]}
    )


@pytest.mark.parametrize("route", ["chat/completions", "messages"])
async def test_long_names_and_paths_leave_nothing_behind(route: str) -> None:
    targets = [Target(name=name, url=f"https://{name}.example/v1") for name in ("one", "two")]
    policies: list[Policy] = [Budget(usd_per_day=1e9, unpriced="allow"), Retry(), Router(targets)]
    transport = ResilientTransport(httpx.MockTransport(answer), policies=policies)

    async def ask(number: int) -> None:
        model, path = f"{number}{LENGTH * 'm'}", f"{number}{LENGTH // 4 * 'p'}"
        url = f"https://api.openai.com/{path}/v1/{route}"
        # Not by a client, which would hand the URL to urllib, and that keeps the last of them.
        reply = await transport.handle_async_request(httpx.Request("POST", url, json={"model": model}))
        assert reply.status_code == 200
        await reply.aread()

    await ask(0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, 21):
            await ask(number)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * LENGTH  # of twenty
