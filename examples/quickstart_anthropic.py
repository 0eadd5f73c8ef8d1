"""The Anthropic SDK with policies on its transport: an overload that passes, and an outage that does not.

Prints:
    The quick brown fox jumps over the lazy dog.
    call 1 in the outage: OverloadedError 529, after 4 requests in all
    call 2 in the outage: OverloadedError 529, after 6 requests in all
    call 3 in the outage: ServiceUnavailableError 503, after 6 requests in all
"""

import asyncio

from anthropic import APIStatusError, AsyncAnthropic, DefaultAsyncHttpxClient

from resilient_llm import Backoff, CircuitBreaker, Deadline, Retry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeProvider, Fault


async def main() -> None:
    provider = FakeProvider()
    provider.script("claude", [Fault(status=529)])

    transport = ResilientTransport(
        provider.httpx2_transport(),  # in memory; without this line requests go over the network
        policies=[
            Deadline(60),
            Retry(max_attempts=2, backoff=Backoff(initial=0.05)),
            CircuitBreaker(consecutive_failures=4),
        ],
    )
    client = AsyncAnthropic(
        base_url="http://provider.example",
        api_key="none",
        http_client=DefaultAsyncHttpxClient(transport=transport),
        max_retries=0,  # one layer retries, and it is the transport
    )

    async def ask() -> str:
        message = await client.messages.create(
            model="claude", max_tokens=64, messages=[{"role": "user", "content": "Tell me about the fox."}]
        )
        return "".join(block.text for block in message.content if block.type == "text")

    async with client:
        print(await ask())

        provider.script("claude", lambda _request: Fault(status=529))
        for number in (1, 2, 3):  # the third finds the circuit open and sends nothing
            try:
                await ask()
            except APIStatusError as error:
                what = f"{type(error).__name__} {error.status_code}"
                print(f"call {number} in the outage: {what}, after {provider.total_requests} requests in all")


if __name__ == "__main__":
    asyncio.run(main())
