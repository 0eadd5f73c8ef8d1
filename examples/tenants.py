"""A noisy tenant beside a quiet one, without a bulkhead and with one, each in a minute of virtual time.

Prints:
    without a bulkhead: quiet's slowest call took 12.6 s; noisy got 200 x 100
    with a bulkhead:    quiet's slowest call took 1.0 s; noisy got 200 x 24, 429 x 76
"""

from collections import Counter
from collections.abc import Sequence

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from resilient_llm import Bulkhead, Policy
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.testing import ASGIStreamTransport, FakeModel, FakeProvider, Latency, run_virtual


def service(policies: Sequence[Policy]) -> Starlette:
    """Make an app that calls a model, which slows down when it serves more than 8 at a time."""
    provider = FakeProvider(FakeModel(knee=8, latency=Latency(first_token=1.0)))
    model = httpx.AsyncClient(transport=provider.transport(), base_url="http://provider/v1", timeout=60)

    async def chat(_request: Request) -> PlainTextResponse:
        reply = await model.post("/chat/completions", json={"model": "gpt-4o", "messages": []})
        return PlainTextResponse(reply.text)

    app = Starlette(routes=[Route("/chat", chat)])
    app.add_middleware(ResilienceMiddleware, tenant="x-tenant", policies=policies)
    return app


async def noisy_and_quiet(policies: Sequence[Policy]) -> str:
    statuses: Counter[int] = Counter()
    slowest = {"noisy": 0.0, "quiet": 0.0}
    transport = ASGIStreamTransport(service(policies))
    async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=60) as client:

        async def call(tenant: str) -> None:
            began = anyio.current_time()
            response = await client.get("/chat", headers={"x-tenant": tenant})
            slowest[tenant] = max(slowest[tenant], anyio.current_time() - began)
            statuses[response.status_code] += tenant == "noisy"

        async with anyio.create_task_group() as tasks:
            for number in range(112):  # noisy makes 100 calls at once, quiet one every 5 s
                tasks.start_soon(call, "noisy" if number < 100 else "quiet")
                await anyio.sleep(0 if number < 100 else 5)
    got = ", ".join(f"{status} x {count}" for status, count in sorted(statuses.items()))
    return f"quiet's slowest call took {slowest['quiet']:.1f} s; noisy got {got}"


if __name__ == "__main__":
    print("without a bulkhead:", run_virtual(noisy_and_quiet, []))
    print("with a bulkhead:   ", run_virtual(noisy_and_quiet, [Bulkhead(max_concurrent=4, max_queued=20)]))
