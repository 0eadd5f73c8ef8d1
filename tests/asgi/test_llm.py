"""`LLMMiddleware`: a ready client in `request.state`, for as long as the app runs."""

from __future__ import annotations

import httpx
import httpx2
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from resilient_llm import Backoff, CircuitBreaker, ConfigurationError, Policy, Retry
from resilient_llm.asgi import LLMMiddleware, ResilienceMiddleware
from resilient_llm.testing import FakeProvider, Fault

BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
POLICIES: list[Policy] = [Retry(backoff=Backoff(initial=0.001, maximum=0.001)), CircuitBreaker()]


class Closable(httpx.MockTransport):
    """Remember being closed."""

    closed = False

    async def aclose(self) -> None:
        """Be closed."""
        self.closed = True


async def ask(request: Request) -> JSONResponse:
    reply = await request.state.llm.post("http://provider.example/v1/chat/completions", json=BODY)
    return JSONResponse(
        {"client": type(request.state.llm).__module__.split(".")[0], "status": reply.status_code}
    )


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
def test_the_transport_decides_the_library_and_its_calls_go_through_the_policies(library: object) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    transport = provider.transport() if library is httpx else provider.httpx2_transport()
    app = Starlette(routes=[Route("/", ask)])
    app.add_middleware(LLMMiddleware, transport=transport, policies=POLICIES)
    with TestClient(app) as client:
        answer = client.get("/").json()
    assert answer == {"client": library.__name__, "status": 200}  # type: ignore[attr-defined]
    assert provider.total_requests == 2


def test_one_client_for_all_requests_closed_after_the_shutdown() -> None:
    transport = Closable(lambda _request: httpx.Response(200))
    seen: list[object] = []

    async def remember(request: Request) -> JSONResponse:
        seen.append(request.state.model)
        return JSONResponse(None)

    app = Starlette(routes=[Route("/", remember)])
    app.add_middleware(LLMMiddleware, transport=transport, state_name="model")
    with TestClient(app) as client:
        client.get("/")
        client.get("/")
        assert not transport.closed
    assert seen[0] is seen[1]
    assert transport.closed


def test_an_sdk_can_be_the_client() -> None:
    provider = FakeProvider()

    async def ask_sdk(request: Request) -> JSONResponse:
        completion = await request.state.llm.chat.completions.create(**BODY)
        return JSONResponse(completion.choices[0].message.content)

    app = Starlette(routes=[Route("/", ask_sdk)])
    app.add_middleware(
        LLMMiddleware,
        transport=provider.httpx2_transport(),
        client=lambda transport: openai.AsyncOpenAI(
            base_url="http://provider.example/v1",
            api_key="fake",
            http_client=httpx2.AsyncClient(transport=transport),  # type: ignore[arg-type]
        ),
    )
    with TestClient(app) as client:
        assert client.get("/").json()


def test_the_tenant_of_the_request_is_the_tenant_of_its_calls() -> None:
    provider = FakeProvider()
    seen: list[str | None] = []

    class Note:
        async def __call__(self, call, call_next):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
            seen.append(call.tenant)
            return await call_next(call)

    app = Starlette(routes=[Route("/", ask)])
    app.add_middleware(LLMMiddleware, transport=provider.transport(), policies=[Note()])
    app.add_middleware(ResilienceMiddleware, tenant="x-tenant")
    with TestClient(app) as client:
        client.get("/", headers={"x-tenant": "acme"})
    assert seen == ["acme"]


def test_options_that_cannot_work_are_refused() -> None:
    app = Starlette()
    with pytest.raises(ConfigurationError, match="state_name='my llm'"):
        LLMMiddleware(app, state_name="my llm")
    with pytest.raises(ConfigurationError, match="library='requests'"):
        LLMMiddleware(app, library="requests")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an async transport"):
        LLMMiddleware(app, transport=object())  # type: ignore[arg-type]
