"""Stream tokens through the policies: a slot is held until the stream ends, and no longer.

Prints:
    read to the end: one two three four (1 slot in use meanwhile, 0 after)
    left after two words: one two (1 slot in use meanwhile, 0 after)
    The provider sent 4 tokens, then 2.
"""

import asyncio

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from resilient_llm import Bulkhead, Deadline, Retry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeModel, FakeProvider, Latency


async def main() -> None:
    provider = FakeProvider(FakeModel(reply="one two three four", latency=Latency(per_token=0.05)))
    slots = Bulkhead(max_concurrent=1)
    transport = ResilientTransport(provider.httpx2_transport(), policies=[Deadline(60), slots, Retry()])
    client = AsyncOpenAI(
        base_url="http://provider.example/v1",
        api_key="none",
        http_client=DefaultAsyncHttpxClient(transport=transport),
        max_retries=0,
    )

    async def read(words: int) -> str:
        text, meanwhile = "", 0
        stream = await client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "Count."}], stream=True
        )
        async with stream:  # closes it even when it is left early; a bare `break` would not, at once
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                meanwhile = slots.in_use()
                if len(text.split()) == words:
                    break
        return f"{text.strip()} ({meanwhile} slot in use meanwhile, {slots.in_use()} after)"

    async with client:
        print("read to the end:", await read(words=5))
        print("left after two words:", await read(words=2))
        await provider.wait_until_idle()
    first, second = provider.requests
    print(f"The provider sent {first.tokens_sent} tokens, then {second.tokens_sent}.")


if __name__ == "__main__":
    asyncio.run(main())
