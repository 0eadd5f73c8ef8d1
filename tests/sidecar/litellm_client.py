"""What LiteLLM's SDK makes of servers: litellm_client.py KEY URL..., a JSON object for each on standard output.

A program of its own, since LiteLLM keeps clients, threads and settings for the whole of a process.
"""

# ruff: noqa: T201 - a program prints

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

from tests.sidecar.twins import HELLO, SEEING, TOOLS


def plain(reply: Any) -> Any:
    """Give a reply without what LiteLLM measured or drew."""
    got = reply.model_dump(exclude={"created", "_hidden_params", "_response_ms"}, warnings=False)
    return json.loads(json.dumps(got, default=str))


async def failure(model: str, **options: Any) -> list[object]:
    """Make a call that fails, and say how."""
    try:
        await litellm.acompletion(model=f"openai/{model}", messages=HELLO, **options)
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return [type(error).__name__, getattr(error, "status_code", None)]
    raise AssertionError(f"{model} did not fail")


async def calls(url: str, key: str) -> dict[str, Any]:
    """Make all calls of a server."""
    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": key, "num_retries": 0, "max_retries": 0}
    chat: dict[str, Any] = {"model": "openai/gpt-4o", "messages": HELLO, **options}
    whole = await asyncio.to_thread(litellm.completion, **chat)
    stream = await litellm.acompletion(**chat, stream=True, stream_options={"include_usage": True})
    claude = await litellm.acompletion(
        model="anthropic/claude", messages=HELLO, **{**options, "api_base": url}, max_tokens=100
    )
    return {
        "chat": plain(whole),
        "achat": plain(await litellm.acompletion(**chat)),
        "stream": [plain(chunk) async for chunk in stream],
        "tools": plain(await litellm.acompletion(**chat, tools=TOOLS)),
        "picture": plain(await litellm.acompletion(**{**chat, "messages": SEEING})),
        "embedding": plain(await litellm.aembedding(model="openai/e", input=["one", "two"], **options)),
        "anthropic": plain(claude) | {"id": None},  # for which LiteLLM draws one
        "failures": {model: await failure(model, **options) for model in ("bad", "limited", "down")},
    }


async def main(key: str, *urls: str) -> None:
    """Make all calls of one server after the other: what takes long is to import LiteLLM."""
    for url in urls:
        print(json.dumps(await calls(url, key)))
    await close_litellm_async_clients()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    asyncio.run(main(*sys.argv[1:]))
