"""The service of this folder, its provider in memory and in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from integrations.fastapi.app import create_app
from resilient_llm.testing import ASGIStreamTransport, FakeModel, FakeProvider, Fault, Latency

# Not on trio: the SDK asks a thread for the platform's name, and trio's virtual clock runs ahead of threads.
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)]

MODEL = "gpt-4o-mini"
FOX = "The quick brown fox jumps over the lazy dog."
QUESTION = {"message": "Tell me about the fox."}


@pytest.fixture(autouse=True)
def provider(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://provider.example/v1")
    return FakeProvider(FakeModel(latency=Latency(headers=1.0)))


@pytest.fixture
async def client(provider: FakeProvider) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(provider.httpx2_transport())
    transport = ASGIStreamTransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://app", timeout=120) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, tenant: str = "acme", path: str = "/chat") -> httpx.Response:
    return await client.post(path, json=QUESTION, headers={"x-tenant": tenant})


async def test_failures_that_pass_are_not_seen(provider: FakeProvider, client: httpx.AsyncClient) -> None:
    provider.script(MODEL, [Fault(status=503), Fault(status=429, headers={"retry-after": "20"})])
    assert (await ask(client)).json() == {"text": FOX}
    assert (await ask(client, path="/chat/stream")).text == FOX
    assert [request.status for request in provider.requests] == [503, 429, 200, 200]


async def test_a_noisy_tenant_waits_behind_itself(client: httpx.AsyncClient) -> None:
    statuses: Counter[int] = Counter()
    async with anyio.create_task_group() as tasks:

        async def noise() -> None:
            statuses[(await ask(client, "noisy")).status_code] += 1

        for _ in range(30):
            tasks.start_soon(noise)
        await anyio.wait_all_tasks_blocked()
        began = anyio.current_time()
        assert (await ask(client, "quiet")).status_code == 200
        assert anyio.current_time() - began == 1  # what the model takes; no wait
    assert statuses == {200: 20, 429: 10}  # 4 run and 16 wait at first


async def test_an_outage_is_a_503_that_says_when_to_come_back(
    provider: FakeProvider, client: httpx.AsyncClient
) -> None:
    provider.script(MODEL, lambda _request: Fault(status=500, message="secrets of the provider"))
    statuses = []
    for _ in range(3):
        response = await ask(client)
        statuses.append(response.status_code)
        assert response.json() == {"detail": "The model gave no answer."}
        assert response.headers["x-should-retry"] == "false"
    assert statuses == [502, 502, 503]  # the circuit is open
    assert int(response.headers["retry-after"]) >= 1


async def test_a_caller_can_ask_for_less_time(client: httpx.AsyncClient) -> None:
    headers = {"x-tenant": "acme", "x-request-timeout": "0.5"}
    assert (await client.post("/chat", json=QUESTION, headers=headers)).status_code == 504
    assert anyio.current_time() == 0.5


async def test_a_request_without_a_tenant_is_refused(client: httpx.AsyncClient) -> None:
    assert (await client.post("/chat", json=QUESTION)).status_code == 401
