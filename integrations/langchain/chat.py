"""Ask a model with LangChain, with policies under it: in this process, or in a sidecar.

Usage: python -m integrations.langchain.chat QUESTION, with OPENAI_API_KEY and, for another server or a sidecar,
OPENAI_BASE_URL.
"""

# ruff: noqa: T201 - a program prints

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import httpx2
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from resilient_llm import Backoff, CircuitBreaker, Deadline, Retry
from resilient_llm.httpx2 import ResilientTransport

MODEL = "gpt-4o-mini"
ATTEMPTS = 4


def make_client(*, backoff: float = 0.5) -> httpx2.AsyncClient:
    """Make the HTTP client that policies stand in."""
    transport = ResilientTransport(
        policies=[
            Deadline(60),
            Retry(max_attempts=ATTEMPTS, backoff=Backoff(initial=backoff)),
            CircuitBreaker(key=("target", "model")),
        ]
    )
    return httpx2.AsyncClient(transport=transport, timeout=60)


def in_process(client: httpx2.AsyncClient) -> ChatOpenAI:
    """Make a model on that client; one layer retries, and with `max_retries=0` that is the transport."""
    return ChatOpenAI(model=MODEL, http_async_client=client, max_retries=0)


def through_a_sidecar(url: str, key: str) -> ChatOpenAI:
    """Make a model that asks a sidecar; one layer retries, and with `max_retries=0` that is the sidecar."""
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=SecretStr(key), max_retries=0)


async def answer(llm: ChatOpenAI, question: str) -> str:
    """Get an answer in one piece."""
    return str((await llm.ainvoke(question)).text)


async def stream(llm: ChatOpenAI, question: str) -> AsyncIterator[str]:
    """Get an answer token by token."""
    async for chunk in llm.astream(question):
        if chunk.text:
            yield str(chunk.text)


async def main(question: str) -> None:
    """Ask twice."""
    async with make_client() as client:
        llm = in_process(client)
        print("in one piece:", await answer(llm, question))
        print("as a stream: ", end="")
        async for token in stream(llm, question):
            print(token, end="", flush=True)
        print()


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    asyncio.run(main(sys.argv[1]))
