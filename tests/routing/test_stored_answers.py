"""Stored responses and conversations: who has made one gets what refers to it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from resilient_llm import Call, CallNext, NoTargetError, Reply, Request, Retry, Router, Target
from resilient_llm.httpx import ResilientTransport
from resilient_llm.routing.balancers import WeightedRandom
from resilient_llm.testing import FakeProvider
from tests.routing.upstreams import FIXED, Upstreams, key, keyed, router, target, throttled
from tests.support import FAILURE, Door

pytestmark = pytest.mark.anyio


class Asking:
    """Ask for a response, in the request's own words."""

    def __init__(self, method: str = "POST", path: str = "/responses", **body: Any) -> None:
        self.request = Request(
            method, f"https://api.example/v1{path}", [], json.dumps(body).encode() if body else b""
        )

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        call.request = self.request
        return await call_next(call)


class Storing(Upstreams):
    """Answer with an id that says who has made it, and how many there were."""

    async def __call__(self, attempt: Call) -> Reply:
        attempt.answer_id = f"resp_{attempt.target.name}{len(self.asked)}"
        return await super().__call__(attempt)


def targets() -> list[Target]:
    return [target(name, url=f"https://{name}.test/v1") for name in "ab"]


def asking(
    upstreams: Upstreams, routing: Router, *args: str, retry: Retry | None = None, **body: Any
) -> Door:
    return Door(Asking(*args, **body), retry or Retry(backoff=FIXED), routing, provider=upstreams)


async def test_a_response_is_gone_on_with_where_it_was_made() -> None:
    upstreams, routing = Storing(), router(targets(), balancer=WeightedRandom())
    while len(set(upstreams.names)) < 2:
        await asking(upstreams, routing, model="m")()
    for number, name in enumerate(list(upstreams.names)):
        for _ in range(5):
            await asking(upstreams, routing, model="m", previous_response_id=f"resp_{name}{number}")()
            assert upstreams.names[-1] == name


async def test_it_waits_for_who_made_it_and_goes_nowhere_else() -> None:
    upstreams, routing = Storing(), router(targets())
    await asking(upstreams, routing, model="m")()
    upstreams.scripts["a"] = [FAILURE, throttled(4.0)]
    await asking(upstreams, routing, model="m", previous_response_id="resp_a0")()
    assert upstreams.names == ["a"] * 4
    upstreams.scripts["a"] = [throttled(500.0)]
    once = Retry(max_attempts=1)
    with pytest.raises(Exception, match="429"):
        await asking(upstreams, routing, model="m", previous_response_id="resp_a0", retry=once)()
    with pytest.raises(NoTargetError) as raised:
        await asking(upstreams, routing, model="m", previous_response_id="resp_a0")()
    assert raised.value.rejected == ("a:cooling_down", "b:stored_elsewhere")
    assert raised.value.retry_after == pytest.approx(500.0)


async def test_what_nobody_knows_goes_where_any_other_call_does() -> None:
    upstreams = Storing(a=[FAILURE])
    await asking(upstreams, router(targets()), model="m", previous_response_id="resp_x")()
    assert upstreams.names == ["a", "b"]


async def test_a_conversation_stays_where_its_first_response_was_made() -> None:
    upstreams, routing = Storing(a=[FAILURE]), router(targets())
    await asking(upstreams, routing, model="m", conversation={"id": "conv_1"})()
    await asking(upstreams, routing, model="m", conversation="conv_1")()
    assert upstreams.names == ["a", "b", "b"]


async def test_a_stored_response_is_read_where_it_was_made_whatever_its_model() -> None:
    upstreams, routing = Storing(), router(dict(zip("mn", targets(), strict=True)))
    await asking(upstreams, routing, model="n")(model="n")

    class Reading(Asking):
        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            call._profile = call.profile.__class__(model=None)
            return await super().__call__(call, call_next)

    reading = Reading("GET", "/responses/resp_b0")
    await Door(reading, Retry(), routing, provider=upstreams)()
    assert upstreams.names == ["b", "b"]


async def test_targets_of_one_account_find_each_others_answers() -> None:
    shared = key("k")
    upstreams = Storing()
    there = "https://one.test/v1"
    routing = router(
        {
            "m": Target(name="a", url=there, credential=shared),
            "n": [keyed("b", key("l")), Target(name="c", url=there, credential=shared)],
        }
    )
    await asking(upstreams, routing, model="m")(model="m")
    await asking(upstreams, routing, model="n", previous_response_id="resp_a0")(model="n")
    assert upstreams.names == ["a", "c"]


async def test_what_is_not_stored_is_not_remembered() -> None:
    upstreams, routing = Storing(), router(targets())
    await asking(upstreams, routing, model="m", store=False)()
    upstreams.scripts["a"] = [FAILURE]
    await asking(upstreams, routing, model="m", previous_response_id="resp_a0")()
    assert upstreams.names == ["a", "a", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_id_is_read_from_the_reply(*, stream: bool) -> None:
    provider = FakeProvider()
    routing = Router(targets(), balancer=WeightedRandom())
    transport = ResilientTransport(provider.transport(), policies=[Retry(), routing])
    async with httpx.AsyncClient(transport=transport, base_url="http://any.example/v1") as client:
        for _ in range(8):
            reply = await client.post("/responses", json={"model": "m", "input": "hi", "stream": stream})
            if stream:
                first = next(line for line in reply.text.splitlines() if line.startswith("data:"))
                made = json.loads(first.removeprefix("data:"))["response"]["id"]
            else:
                made = reply.json()["id"]
            ask = {"model": "m", "input": "go on", "previous_response_id": made}
            next_one = await client.post("/responses", json=ask)
            where = next_one.headers["x-resilient-llm-target"]
            assert where == reply.headers["x-resilient-llm-target"]
