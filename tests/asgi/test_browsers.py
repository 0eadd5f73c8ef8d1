"""Browsers, and what comes after a lifespan."""

from __future__ import annotations

import anyio
import httpx
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from resilient_llm import Bulkhead, Deadline
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.testing import ASGIStreamTransport, run_virtual


def app_with(**options: object) -> Starlette:
    async def answer(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    app = Starlette(routes=[Route("/", answer)])
    app.add_middleware(CORSMiddleware, allow_origins=["https://app.example"], allow_headers=["x-tenant"])
    app.add_middleware(
        ResilienceMiddleware, tenant="x-tenant", policies=[Deadline(5), Bulkhead(max_concurrent=1)]
    )
    return app


def test_a_preflight_needs_no_tenant() -> None:
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "GET",
        "access-control-request-headers": "x-tenant",
    }
    response = TestClient(app_with()).options("/", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"


def test_an_app_whose_lifespan_is_over_answers_again() -> None:
    app = app_with()
    with TestClient(app, headers={"x-tenant": "acme"}) as client:
        assert client.get("/").status_code == 200
    assert TestClient(app, headers={"x-tenant": "acme"}).get("/").status_code == 200


def test_a_tenant_that_is_not_found_out_in_time_is_a_503() -> None:
    async def look_up(_scope: object) -> str:
        await anyio.sleep(3600)
        return "acme"

    async def ask() -> int:
        app = ResilienceMiddleware(Starlette(), tenant=look_up, policies=[Deadline(5)], tenant_timeout=2)
        async with httpx.AsyncClient(transport=ASGIStreamTransport(app), base_url="http://app") as client:
            return (await client.get("/")).status_code

    assert run_virtual(ask) == 503


def test_a_deadline_of_zero_runs_nothing() -> None:
    response = TestClient(app_with(), headers={"x-tenant": "acme", "x-request-timeout": "0"}).get("/")
    assert response.status_code == 504
