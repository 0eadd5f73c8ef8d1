"""The OpenAI SDK with policies on its transport: two failures that the caller never sees.

Prints:
    The quick brown fox jumps over the lazy dog.
    The provider answered 429, 503, 200.
"""

import asyncio

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from resilient_llm import Backoff, CircuitBreaker, Deadline, Retry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeProvider, Fault


async def main() -> None:
    provider = FakeProvider()
    provider.script("gpt-4o", [Fault(status=429, headers={"retry-after-ms": "100"}), Fault(status=503)])

    transport = ResilientTransport(
        provider.httpx2_transport(),  # in memory; without this line requests go over the network
        policies=[Deadline(60), Retry(max_attempts=4, backoff=Backoff(initial=0.1)), CircuitBreaker()],
    )
    client = AsyncOpenAI(
        base_url="http://provider.example/v1",
        api_key="none",
        http_client=DefaultAsyncHttpxClient(transport=transport),
        max_retries=0,  # one layer retries, and it is the transport
    )
    async with client:
        completion = await client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "Tell me about the fox."}]
        )

    print(completion.choices[0].message.content)
    print(f"The provider answered {', '.join(str(request.status) for request in provider.requests)}.")


if __name__ == "__main__":
    asyncio.run(main())
