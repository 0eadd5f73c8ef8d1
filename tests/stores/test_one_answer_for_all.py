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
from tests.support import A_HANG, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]
URL = "http://provider.example/v1/chat/completions"


def limits() -> list[Limit]:
    """Give limits that come back so slowly that a test's own time matters little; but for the burst's, in a second."""
    window = 600
    return [
        Limit(
            key=("tenant", "model"),
            requests_per_minute=1.2,
            tokens_per_minute=600,
            burst=3,
            scope="user",
            window=window,
        ),
        Limit(key="model", requests_per_minute=6, tokens_per_minute=2_000, window=window),
        Limit(key=None, requests_per_minute=60, tokens_per_minute=20_000, scope="global", window=window),
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
        with pytest.raises(RateLimitedError) as caught:
            await self.ask(user, model)
        assert self.asked == asked
        return caught.value


def remaining(error: RateLimitedError) -> dict[str, float]:
    return {level.name: level.remaining for level in error.levels}


class Since:
    """The time that has really gone by, in which levels rise."""

    def __init__(self) -> None:
        self.began = anyio.current_time()

    def refilled(self, level: float, per_minute: float) -> Any:
        gone = anyio.current_time() - self.began
        return pytest.approx(level, abs=per_minute / 60 * gone + 1e-3)


async def test_a_burst_is_refused_by_name_and_passes_when_it_said(server: Any, make_store: Make) -> None:
    one, two = Client(make_store(server)), Client(make_store(server))
    error = None
    # On a machine that takes more than a second over four calls they are no burst.
    for user in ("ada", "bea", "cleo", "dora", "eve", "fay", "gwen", "hope"):
        since, model = Since(), f"large for {user}"
        before = one.asked + two.asked
        try:
            for turn in range(4):
                await (one, two)[turn % 2].ask(user, model)
        except RateLimitedError as refused:
            error = refused
            break
    assert error is not None
    assert one.asked + two.asked - before == 3
    assert error.limit == "burst of user"
    assert 0 < error.retry_after <= 0.34  # type: ignore[operator]
    left = remaining(error)
    assert left["requests of user"] == since.refilled(9, 1.2)
    assert left["tokens of user"] == since.refilled(5_700, 600)
    assert left["requests of model"] == since.refilled(57, 6)
    assert left["tokens of model"] == since.refilled(19_700, 2_000)
    await one.ask("bob", model)  # another user has limits of their own
    await one.ask(user, "small")  # and each model
    await anyio.sleep(error.retry_after or 0)
    await two.ask(user, model)


async def test_requests_are_refused_by_name(server: Any, make_store: Make) -> None:
    one, two = Client(make_store(server)), Client(make_store(server))
    since = Since()
    for turn in range(12):
        await (one, two)[turn % 2].ask()
        await anyio.sleep(0.34)  # as many a second as the burst allows
    error = await two.refused()
    assert error.limit == "requests of user"
    assert 0 < error.retry_after <= 50  # type: ignore[operator]
    assert error.remaining < 1
    left = remaining(error)
    assert left["requests of model"] == since.refilled(48, 6)
    assert left["requests of global"] == since.refilled(588, 60)
    assert left["tokens of global"] == since.refilled(198_800, 20_000)


async def test_tokens_are_refused_by_name_and_what_was_not_used_is_given_back(
    server: Any, make_store: Make
) -> None:
    one, two = Client(make_store(server), tokens=2_500), Client(make_store(server), tokens=2_500, used=500)
    since = Since()
    await one.ask()
    await one.ask()
    error = await two.refused()
    assert error.limit == "tokens of user"
    assert error.remaining == since.refilled(1_000, 600)
    assert error.retry_after == since.refilled(150, 60)
    assert remaining(error)["tokens of model"] == since.refilled(15_000, 2_000)
    # 2,500 are reserved and 500 used: what another process finds is what is really left.
    await two.ask(user="bob")

    async def is_really_left() -> bool:  # what was heard less than a second ago is good enough to refuse by
        return bool(remaining(await one.refused())["tokens of model"] == since.refilled(14_500, 2_000))

    await until(is_really_left)


async def test_what_waits_comes_through_by_itself(server: Any, make_store: Make) -> None:
    one, two = Client(make_store(server), max_wait=60), Client(make_store(server), max_wait=60)
    began = anyio.current_time()
    with anyio.fail_after(A_HANG):
        async with anyio.create_task_group() as tasks:
            for turn in range(6):
                tasks.start_soon((one, two)[turn % 2].ask)
    # Three at once, and three a second from then on.
    assert anyio.current_time() - began >= 0.99


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
                    requests_per_minute=6,
                    tokens_per_minute=600,
                    burst=2,
                    scope="user",
                    window=600,
                ),
                Limit(key=model_of, requests_per_minute=60, scope="model", window=600),
                Limit(key=None, requests_per_minute=600, scope="global", window=600),
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
        )

    async with service() as one, service() as two:
        # On a machine that takes more than half a second over a request they are no burst.
        for user in ("ada", "bea", "cleo", "dora", "eve", "fay", "gwen", "hope"):
            headers = {"x-tenant": user, "x-model": f"large for {user}"}
            first = await one.get("/", headers=headers)
            await two.get("/", headers=headers)
            refused = await one.get("/", headers=headers)
            if refused.status_code == 429:
                break
        assert first.headers["ratelimit-policy"] == (
            '"requests-user";q=60;w=600, "tokens-user";q=6000;w=600;qu="tokens", "burst-user";q=2;w=1, '
            '"requests-model";q=600;w=600, "requests-global";q=6000;w=600'
        )
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["code"] == "rate_limited"
        standing = dict(each.split(";", 1) for each in refused.headers["ratelimit"].split(", "))
        assert standing['"burst-user"'].startswith("r=0;t=1")
        assert standing['"requests-user"'].startswith("r=58")
        assert standing['"tokens-user"'].startswith(("r=58", "r=59"))
        assert standing['"requests-model"'].startswith(("r=598", "r=599", "r=600"))
        assert standing['"requests-global"'].startswith(("r=59", "r=60"))
        assert (await one.get("/", headers=headers | {"x-tenant": "bob"})).status_code == 200
        await anyio.sleep(0.55)
        assert (await two.get("/", headers=headers)).status_code == 200
