"""A FastAPI service that bounds each tenant at its door and retries on the transport of its LLM client.

Prints:
    acme: 200 The quick brown fox jumps over the lazy dog., after 2 requests
    four at once for acme, which may have two: 200, 200, 429, 429
"""

import asyncio

import httpx
from fastapi import FastAPI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from resilient_llm import Backoff, Bulkhead, CircuitBreaker, Deadline, Retry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import ASGIStreamTransport, FakeModel, FakeProvider, Fault, Latency

provider = FakeProvider(FakeModel(latency=Latency(headers=0.05)))
transport = ResilientTransport(
    provider.httpx2_transport(),  # in memory; without this line requests go over the network
    policies=[Deadline(20), Retry(backoff=Backoff(initial=0.05)), CircuitBreaker()],
)
http = DefaultAsyncHttpxClient(transport=transport)
llm = AsyncOpenAI(base_url="http://provider/v1", api_key="none", http_client=http, max_retries=0)

app = FastAPI()
app.add_middleware(
    ResilienceMiddleware,
    tenant="x-tenant",  # set by a gateway that has authenticated the caller; see docs/asgi.md
    policies=[Deadline(30), Bulkhead(max_concurrent=2, max_queued=0)],
)


@app.post("/chat")
async def chat(question: dict[str, str]) -> str | None:
    completion = await llm.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": question["message"]}]
    )
    return completion.choices[0].message.content


async def main() -> None:
    async with httpx.AsyncClient(transport=ASGIStreamTransport(app), base_url="http://app") as client:

        async def ask(tenant: str) -> httpx.Response:
            return await client.post("/chat", json={"message": "Why?"}, headers={"x-tenant": tenant})

        provider.script("gpt-4o", [Fault(status=503)])
        reply = await ask("acme")
        print(f"acme: {reply.status_code} {reply.json()}, after {provider.total_requests} requests")
        replies = await asyncio.gather(*(ask("acme") for _ in range(4)))
        print("four at once for acme, which may have two:", ", ".join(str(r.status_code) for r in replies))


if __name__ == "__main__":
    asyncio.run(main())
