"""Ask a model with the Anthropic SDK, in one piece and as a stream, with policies on the SDK's transport.

Usage: python -m integrations.anthropic.chat QUESTION, with ANTHROPIC_API_KEY (and ANTHROPIC_BASE_URL).
"""

# ruff: noqa: T201 - a program prints

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from resilient_llm import Backoff, CircuitBreaker, Deadline, Retry
from resilient_llm.httpx2 import ResilientTransport

MODEL = "claude-haiku-4-5"
ATTEMPTS = 4


def make_client(*, backoff: float = 0.5, max_retries: int = 0) -> AsyncAnthropic:
    """Make a client; one layer retries, and with `max_retries=0` that is the transport."""
    transport = ResilientTransport(
        policies=[
            Deadline(60),
            Retry(max_attempts=ATTEMPTS, backoff=Backoff(initial=backoff)),
            CircuitBreaker(key=("target", "model")),
        ]
    )
    return AsyncAnthropic(http_client=DefaultAsyncHttpxClient(transport=transport), max_retries=max_retries)


async def answer(client: AsyncAnthropic, question: str) -> str:
    """Get an answer in one piece."""
    message = await client.messages.create(
        model=MODEL, max_tokens=256, messages=[{"role": "user", "content": question}]
    )
    return "".join(block.text for block in message.content if block.type == "text")


async def stream(client: AsyncAnthropic, question: str) -> AsyncIterator[str]:
    """Get an answer token by token."""
    async with client.messages.stream(
        model=MODEL, max_tokens=256, messages=[{"role": "user", "content": question}]
    ) as events:
        async for text in events.text_stream:
            yield text


async def main(question: str) -> None:
    """Ask twice."""
    async with make_client() as client:
        print("in one piece:", await answer(client, question))
        print("as a stream: ", end="")
        async for text in stream(client, question):
            print(text, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
