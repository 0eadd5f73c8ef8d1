"""Ask a model with the OpenAI SDK, in one piece and as a stream, with policies on the SDK's transport.

Usage: python -m integrations.openai.chat QUESTION, with OPENAI_API_KEY and, for another server, OPENAI_BASE_URL.
"""

# ruff: noqa: T201 - a program prints

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from resilient_llm import Backoff, CircuitBreaker, Deadline, Retry
from resilient_llm.httpx2 import ResilientTransport

MODEL = "gpt-4o-mini"
ATTEMPTS = 4


def make_client(*, backoff: float = 0.5, max_retries: int = 0) -> AsyncOpenAI:
    """Make a client; one layer retries, and with `max_retries=0` that is the transport."""
    transport = ResilientTransport(
        policies=[
            Deadline(60),
            Retry(max_attempts=ATTEMPTS, backoff=Backoff(initial=backoff)),
            CircuitBreaker(key=("target", "model")),
        ]
    )
    return AsyncOpenAI(http_client=DefaultAsyncHttpxClient(transport=transport), max_retries=max_retries)


async def answer(client: AsyncOpenAI, question: str) -> str:
    """Get an answer in one piece."""
    completion = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}]
    )
    return completion.choices[0].message.content or ""


async def stream(client: AsyncOpenAI, question: str) -> AsyncIterator[str]:
    """Get an answer token by token."""
    events = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], stream=True
    )
    async with events:  # also a reader that leaves early ends the call
        async for event in events:
            if event.choices and (token := event.choices[0].delta.content):
                yield token


async def main(question: str) -> None:
    """Ask twice."""
    async with make_client() as client:
        print("in one piece:", await answer(client, question))
        print("as a stream: ", end="")
        async for token in stream(client, question):
            print(token, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
