"""`RateLimit` at the ASGI door: requests are limited, and every response says where the limits stand."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from resilient_llm import Limit, RateLimit
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.testing import ASGIStreamTransport

pytestmark = pytest.mark.anyio


def client_of(*policies: RateLimit, **headers: str) -> httpx.AsyncClient:
    async def answer(_request: Request) -> JSONResponse:
        return JSONResponse({"ok": True}, headers=headers)

    app: Any = ResilienceMiddleware(
        Starlette(routes=[Route("/", answer)]), tenant="x-tenant", policies=policies
    )
    return httpx.AsyncClient(
        transport=ASGIStreamTransport(app), base_url="http://app.example", headers={"x-tenant": "acme"}
    )


async def test_every_response_says_where_the_limits_stand() -> None:
    limit = RateLimit(requests_per_minute=60, burst=2, max_wait=0)
    async with client_of(limit) as client:
        first = await client.get("/")
        assert first.headers["ratelimit-policy"] == '"requests-tenant";q=60;w=60, "burst-tenant";q=2;w=1'
        assert first.headers["ratelimit"] == '"requests-tenant";r=59;t=1, "burst-tenant";r=1;t=1'
        await client.get("/")
        refused = await client.get("/")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["ratelimit"] == '"requests-tenant";r=58;t=2, "burst-tenant";r=0;t=1'
        assert refused.json()["code"] == "rate_limited"
        assert refused.json()["detail"] == "You are over a rate limit. Try again later."
        other = await client.get("/", headers={"x-tenant": "other"})
        assert other.status_code == 200


async def test_several_scopes_are_told_apart() -> None:
    limit = RateLimit(
        limits=[Limit(key="tenant", requests_per_minute=60), Limit(key=None, requests_per_minute=600)]
    )
    async with client_of(limit) as client:
        response = await client.get("/")
    assert response.headers["ratelimit"] == '"requests-tenant";r=59;t=1, "requests-account";r=599;t=1'


async def test_two_policies_are_told_apart_by_name() -> None:
    first, second = RateLimit(requests_per_minute=60), RateLimit(requests_per_minute=600, name="outer")
    async with client_of(first, second) as client:
        response = await client.get("/")
    told = '"requests-tenant-rate_limit";r=59;t=1, "requests-tenant-outer";r=599;t=1'
    assert response.headers["ratelimit"] == told


async def test_two_of_one_name_by_their_place() -> None:
    async with client_of(RateLimit(requests_per_minute=60), RateLimit(requests_per_minute=600)) as client:
        response = await client.get("/")
    told = '"requests-tenant-rate_limit";r=59;t=1, "requests-tenant-rate_limit-2";r=599;t=1'
    assert response.headers["ratelimit"] == told


async def test_a_dry_run_tells_nothing() -> None:
    dry = RateLimit(requests_per_minute=1, dry_run=True)
    async with client_of(dry) as client:
        assert "ratelimit" not in (await client.get("/")).headers
    async with client_of(dry, RateLimit(requests_per_minute=60)) as client:
        assert (await client.get("/")).headers["ratelimit"] == '"requests-tenant";r=59;t=1'


async def test_a_scope_is_written_as_a_structured_field_allows() -> None:
    limit = RateLimit(limits=[Limit(key="tenant", requests_per_minute=60, scope='für "a"\r\nx: 5%')])
    async with client_of(limit) as client:
        response = await client.get("/")
    told = b'"requests-f%C3%BCr %22a%22%0D%0Ax: 5%25";r=59;t=1'
    assert dict(response.headers.raw)[b"ratelimit"] == told


async def test_a_request_without_a_tenant_is_told_nothing_and_breaks_nothing() -> None:
    limit = RateLimit(requests_per_minute=60, key=lambda call: str(call.tenant.lower()))  # type: ignore[union-attr]
    async with client_of(limit) as client:
        response = await client.get("/", headers={"x-tenant": ""})
    assert response.status_code == 401
    assert "ratelimit" not in response.headers


async def test_an_app_that_tells_its_own_limits_is_left_alone() -> None:
    async with client_of(RateLimit(requests_per_minute=60), RateLimit='"mine";r=1;t=1') as client:
        response = await client.get("/")
    assert response.headers.get_list("ratelimit") == ['"mine";r=1;t=1']


async def test_waiting_is_tried_before_refusing() -> None:
    async with client_of(RateLimit(requests_per_minute=60, window=1, max_wait=5)) as client:
        statuses = [(await client.get("/")).status_code for _ in range(4)]
    assert statuses == [200] * 4
