"""Ask a sidecar through LiteLLM's SDK, whose own retries are off.

Usage: python -m integrations.litellm.chat QUESTION..., with GATEWAY_URL and GATEWAY_KEY.
"""

# ruff: noqa: T201 - a program prints

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import litellm
from litellm.exceptions import ServiceUnavailableError
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

MODEL = "gpt-4o-mini"


def options() -> dict[str, Any]:
    """Say where to ask; one layer retries, and that is the sidecar."""
    url, key = os.environ["GATEWAY_URL"], os.environ["GATEWAY_KEY"]
    return {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": key} | {
        "num_retries": 0,
        "max_retries": 0,
    }


async def answer(question: str) -> str:
    """Get an answer in one piece."""
    reply: Any = await litellm.acompletion(messages=[{"role": "user", "content": question}], **options())
    return str(reply.choices[0].message.content)


async def stream(question: str) -> AsyncIterator[str]:
    """Get an answer token by token."""
    messages = [{"role": "user", "content": question}]
    chunks: Any = await litellm.acompletion(messages=messages, stream=True, **options())
    async for chunk in chunks:
        if token := chunk.choices[0].delta.content:
            yield token


async def main(*questions: str) -> None:
    """Ask everything twice, and say so if it fails."""
    litellm.suppress_debug_info = True
    for question in questions:
        try:
            print("in one piece:", await answer(question))
            print("as a stream:", "".join([token async for token in stream(question)]))
        except ServiceUnavailableError as error:
            print("unavailable:", error.status_code)
    await close_litellm_async_clients()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
