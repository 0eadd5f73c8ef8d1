"""Per user and model: requests, tokens and bursts, kept for two processes by one server; the refusal says all there is.

The first process is a client of a model, the second too, and then a service whose requests are limited at its door.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from resilient_llm import Limit, RateLimit, RateLimitedError, ambient
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx import ResilientTransport
from resilient_llm.stores import RedisStore
from resilient_llm.testing import ASGIStreamTransport

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]
URL = "http://provider.example/v1/chat/completions"


def limits() -> list[Limit]:
    return [
        Limit(
            key=("tenant", "model"), requests_per_minute=12, tokens_per_minute=6_000, burst=3, scope="user"
        ),
        Limit(key="model", requests_per_minute=60, tokens_per_minute=20_000),
        Limit(key=None, requests_per_minute=600, tokens_per_minute=200_000, scope="global"),
    ]


class Client:
    """One process that asks models."""

    def __init__(
        self, store: RedisStore, tokens: float = 100, used: int | None = None, max_wait: float = 0
    ) -> None:
        self.asked = 0
        self.used = int(tokens) if used is None else used
        limit = RateLimit(
            limits=limits(), store=store, estimate=lambda _call: tokens, max_wait=max_wait, name="c"
        )
        self.http = httpx.AsyncClient(
            transport=ResilientTransport(
                httpx.MockTransport(self.answer), policies=[limit], on_rejection="raise"
            )
        )

    def answer(self, _request: httpx.Request) -> httpx.Response:
        self.asked += 1
        usage = {"prompt_tokens": self.used, "completion_tokens": 0, "total_tokens": self.used}
        return httpx.Response(200, json={"object": "chat.completion", "choices": [], "usage": usage})

    async def ask(self, user: str = "ada", model: str = "large") -> None:
        with ambient(tenant=user):
            response = await self.http.post(URL, json={"model": model, "messages": []})
        assert response.status_code == 200, response.text

    async def refused(self, user: str = "ada", model: str = "large") -> RateLimitedError:
        asked = self.asked
        with pytest.raises(RateLimitedError) as caught, ambient(tenant=user):
            await self.http.post(URL, json={"model": model, "messages": []})
        assert self.asked == asked
        return caught.value


def remaining(error: RateLimitedError) -> dict[str, float]:
    return {level.name: level.remaining for level in error.levels}


async def test_a_burst_is_refused_by_name_and_passes_when_it_said(server: Any, make_store: Make) -> None:
    one, two = Client(make_store(server)), Client(make_store(server))
    for client in (one, two, one):
        await client.ask()
    error = await two.refused()
    assert error.limit == "burst of user"
    assert 0 < error.retry_after <= 0.34  # type: ignore[operator]
    left = remaining(error)
    assert left["requests of user"] == pytest.approx(9, abs=0.3)
    assert left["tokens of user"] == pytest.approx(5_700, abs=100)
    assert left["requests of model"] == pytest.approx(57, abs=0.8)
    assert left["tokens of model"] == pytest.approx(19_700, abs=200)
    assert left["requests of global"] == pytest.approx(597, abs=2.5)
    assert left["tokens of global"] == pytest.approx(199_700, abs=300)
    await one.ask(user="bob")  # another user has limits of their own
    await one.ask(model="small")  # and each model
    await anyio.sleep(error.retry_after or 0)
    await two.ask()


async def test_requests_are_refused_by_name(server: Any, make_store: Make) -> None:
    one, two = Client(make_store(server)), Client(make_store(server))
    for turn in range(12):
        await (one, two)[turn % 2].ask()
        await anyio.sleep(0.34)  # as many a second as the burst allows
    error = await two.refused()
    assert error.limit == "requests of user"
    assert 0 < error.retry_after <= 5  # type: ignore[operator]
    assert error.remaining < 1
    assert remaining(error)["requests of model"] == pytest.approx(52, abs=1.5)


async def test_tokens_are_refused_by_name_and_what_was_not_used_is_given_back(
    server: Any, make_store: Make
) -> None:
    one, two = Client(make_store(server), tokens=2_500), Client(make_store(server), tokens=2_500, used=500)
    await one.ask()
    await one.ask()
    error = await two.refused()
    assert error.limit == "tokens of user"
    assert error.remaining == pytest.approx(1_000, abs=120)
    assert error.retry_after == pytest.approx(15, abs=1)
    assert remaining(error)["tokens of model"] == pytest.approx(15_000, abs=300)
    # 2,500 are reserved and 500 used: what another process finds is what is really left.
    await two.ask(user="bob")
    await anyio.sleep(1.1)  # what was heard a second ago is too old to refuse by
    assert remaining(await one.refused())["tokens of model"] == pytest.approx(14_900, abs=500)


async def test_what_waits_comes_through_by_itself(server: Any, make_store: Make) -> None:
    one, two = Client(make_store(server), max_wait=5), Client(make_store(server), max_wait=5)
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for turn in range(6):
            tasks.start_soon((one, two)[turn % 2].ask)
    # Three at once, and three a second from then on.
    assert 0.9 <= anyio.current_time() - began < 4


async def test_at_the_door_a_429_says_where_all_limits_stand(server: Any, make_store: Make) -> None:
    def model_of(call: Any) -> str:
        return next((value.decode() for name, value in call.request.headers if name == b"x-model"), "")

    def service() -> httpx.AsyncClient:
        async def answer(_request: Request) -> JSONResponse:
            return JSONResponse({"ok": True})

        limit = RateLimit(
            limits=[
                Limit(
                    key=lambda call: (call.tenant, model_of(call)),
                    requests_per_minute=60,
                    tokens_per_minute=6_000,
                    burst=2,
                    scope="user",
                ),
                Limit(key=model_of, requests_per_minute=600, scope="model"),
                Limit(key=None, requests_per_minute=6_000, scope="global"),
            ],
            estimate=lambda _call: 100,
            max_wait=0,
            store=make_store(server),
        )
        app = ResilienceMiddleware(
            Starlette(routes=[Route("/", answer)]), tenant="x-tenant", policies=[limit]
        )
        return httpx.AsyncClient(
            transport=ASGIStreamTransport(app),
            base_url="http://app.example",
            headers={"x-tenant": "ada", "x-model": "large"},
        )

    async with service() as one, service() as two:
        first = await one.get("/")
        assert first.headers["ratelimit-policy"] == (
            '"requests-user";q=60;w=60, "tokens-user";q=6000;w=60;qu="tokens", "burst-user";q=2;w=1, '
            '"requests-model";q=600;w=60, "requests-global";q=6000;w=60'
        )
        await two.get("/")
        refused = await one.get("/")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["code"] == "rate_limited"
        standing = dict(each.split(";", 1) for each in refused.headers["ratelimit"].split(", "))
        assert standing['"burst-user"'].startswith("r=0;t=1")
        assert standing['"requests-user"'].startswith("r=58")
        assert standing['"tokens-user"'].startswith(("r=580", "r=581"))
        assert standing['"requests-model"'].startswith("r=598")
        assert standing['"requests-global"'].startswith(
            ("r=5998", "r=5999", "r=6000")
        )  # 100 a second come back
        assert (await one.get("/", headers={"x-tenant": "bob"})).status_code == 200
        await anyio.sleep(0.55)
        assert (await two.get("/")).status_code == 200
