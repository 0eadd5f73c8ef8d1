"""Requests that come again with the same key: answered once, refused when they are another."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import openai
import pytest

import resilient_llm.httpx2
from resilient_llm import ConfigurationError, Deadline, Pipeline, Retry, ambient
from resilient_llm.errors import IdempotencyKeyError
from resilient_llm.policies.cache import Cache
from resilient_llm.policies.idempotency import Idempotency
from resilient_llm.testing import FakeModel, FakeProvider
from tests.policies.caching import (
    ASK,
    STREAMED,
    WHOLE,
    Setting,
    SlowStore,
    answer,
    code,
    problem,
    served,
    slow_stream,
)
from tests.support import cancel_at_every_await

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:.*<async_generator object:pytest.PytestUnraisableExceptionWarning"),
]

K1 = {"idempotency-key": "k1"}
CREATIVE = {**ASK, "temperature": 1}


@pytest.mark.parametrize("body", [CREATIVE, {**CREATIVE, "store": True}, {**STREAMED, "temperature": 1}])
async def test_the_same_key_has_the_same_answer(body: Any) -> None:
    setting = Setting(Idempotency(ttl=100), slow_stream if body.get("stream") else answer)
    _, first = await setting.ask(body, headers=K1)
    await anyio.sleep(50)
    response, again = await setting.ask(body, headers=K1)
    assert (served(response), again, response.headers["age"]) == ("replay", first, "50")
    assert setting.sent == 1
    await anyio.sleep(50)
    assert served((await setting.ask(body, headers=K1))[0]) is None
    setting.check_nothing_is_left()


async def test_without_a_key_nothing_is_kept() -> None:
    setting = Setting(Idempotency())
    for headers in ({}, {}, {"idempotency-key": ""}, {"idempotency-key": ""}):
        await setting.ask(headers=headers)
    assert setting.sent == 4


async def test_a_key_is_its_owners() -> None:
    setting = Setting(Idempotency())
    for tenant, credential in [("a", "1"), ("b", "1"), ("a", "2"), ("a", "1")]:
        with ambient(tenant=tenant):
            await setting.ask(CREATIVE, headers={**K1, "authorization": credential})
    assert setting.sent == 3


@pytest.mark.parametrize(
    "other",
    [{"body": {**CREATIVE, "user": "u"}}, {"url": "http://h.example/v1/responses"}],
    ids=["body", "url"],
)
async def test_another_request_with_the_same_key_is_refused(other: Any) -> None:
    setting = Setting(Idempotency(), delay=2.0)

    async def is_refused() -> None:
        response, body = await setting.ask(**{"body": CREATIVE, "headers": K1, **other})
        assert (response.status_code, code(body)) == (422, "idempotency_key")
        assert response.headers["x-should-retry"] == "false"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: setting.ask(CREATIVE, headers=K1))
        await anyio.sleep(1)
        await is_refused()  # while the first is in flight
    await is_refused()  # and later
    assert served((await setting.ask(CREATIVE, headers=K1))[0]) == "replay"
    assert setting.sent == 1
    setting.check_nothing_is_left()


async def test_a_false_request_does_not_get_the_right_one_refused() -> None:
    """While the false one waits for the store, nobody knows yet which is the right one."""
    setting = Setting(Idempotency(store=SlowStore(delay=0.2)))
    await setting.ask(CREATIVE, headers=K1)
    statuses: list[int] = []

    async def ask(body: Any) -> None:
        statuses.append((await setting.ask(body, headers=K1))[0].status_code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, ASK)
        await anyio.sleep(0.1)
        tasks.start_soon(ask, CREATIVE)
        tasks.start_soon(ask, ASK)
    assert (sorted(statuses), setting.sent) == ([200, 422, 422], 1)
    setting.check_nothing_is_left()


async def test_it_waits_for_a_request_in_flight() -> None:
    setting = Setting(Idempotency(), slow_stream)
    answers = await setting.together(3, STREAMED, headers=K1)
    assert [body for _, body in answers] == [WHOLE] * 3
    assert sorted(str(served(r)) for r, _ in answers) == ["None", "coalesced", "coalesced"]
    assert setting.sent == 1
    setting.check_nothing_is_left()


async def test_it_does_not_wait_for_ever_and_never_makes_it_twice() -> None:
    setting = Setting(Idempotency(max_wait=3.0), delay=10.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: setting.ask(CREATIVE, headers=K1))
        await anyio.sleep(1)
        response, body = await setting.ask(CREATIVE, headers=K1)
        assert (response.status_code, code(body)) == (409, "idempotency_key")
        assert response.headers["retry-after"] == "3"
    assert setting.sent == 1
    setting.check_nothing_is_left()


async def test_as_an_exception() -> None:
    setting = Setting(Idempotency(), on_rejection="raise")
    await setting.ask(CREATIVE, headers=K1)
    with pytest.raises(IdempotencyKeyError, match="used for another request") as raised:
        await setting.ask(ASK, headers=K1)
    assert (raised.value.status, raised.value.name, raised.value.retry_after) == (422, "idempotency", None)


async def test_after_a_failure_it_is_another_try() -> None:
    setting = Setting(Idempotency(), lambda: problem(500), answer)
    assert (await setting.ask(CREATIVE, headers=K1))[0].status_code == 500
    assert (await setting.ask(CREATIVE, headers=K1))[0].status_code == 200
    assert served((await setting.ask(CREATIVE, headers=K1))[0]) == "replay"


async def test_a_first_request_that_is_cancelled_is_made_by_the_second() -> None:
    setting = Setting(Idempotency(), outer=(Deadline(100),), delay=3.0)

    async def leave() -> None:
        with anyio.move_on_after(1):
            await setting.ask(CREATIVE, headers=K1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        await anyio.sleep(0.5)
        answers = await setting.together(2, CREATIVE, headers=K1)
    assert ([r.status_code for r, _ in answers], setting.sent) == ([200, 200], 2)
    setting.check_nothing_is_left()


async def test_what_is_too_large_is_made_again_one_after_another() -> None:
    setting = Setting(Idempotency(max_body=10))
    began = anyio.current_time()
    await setting.together(3, CREATIVE, headers=K1)
    assert setting.sent == 3
    assert anyio.current_time() - began == pytest.approx(3)
    setting.check_nothing_is_left()


async def test_with_a_cache_behind_it() -> None:
    setting = Setting(Idempotency(), inner=(Cache(), Retry()))
    for headers, expected in [
        (K1, None),
        ({}, "hit"),
        (K1, "replay"),
        ({"idempotency-key": "k2"}, "hit"),
        ({"idempotency-key": "k2"}, "replay"),
    ]:
        response, body = await setting.ask(headers=headers)
        assert (served(response), b"Hello" in body) == (expected, True)
        assert len(response.headers.get_list("x-resilient-llm-cache")) <= 1
    assert setting.sent == 1
    setting.check_nothing_is_left()


async def test_cancelled_at_every_await() -> None:
    setting = Setting(Idempotency(store=SlowStore()), slow_stream)

    async def scenario() -> None:
        setting.policy.store.values.clear()  # type: ignore[union-attr]
        await setting.ask(STREAMED, headers=K1)

    async def check() -> None:
        setting.check_nothing_is_left()

    assert await cancel_at_every_await(scenario, check) > 5


async def test_openai() -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    transport = resilient_llm.httpx2.ResilientTransport(
        provider.httpx2_transport(), policies=[Idempotency(), Retry()]
    )
    http = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(api_key="k", base_url="http://fake/v1", http_client=http) as client:

        async def ask(text: str) -> openai.types.chat.ChatCompletion:
            return await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                extra_headers={"Idempotency-Key": "k"},
            )

        first, second = await ask("hi"), await ask("hi")
        assert (first.id, first.created) == (second.id, second.created)
        with pytest.raises(openai.UnprocessableEntityError, match="another request"):
            await ask("ho")
    assert provider.total_requests == 1


def test_options() -> None:
    for options, message in [
        ({"ttl": 0}, "ttl=0"),
        ({"max_wait": -1}, "max_wait=-1"),
        ({"max_body": -1}, "max_body=-1"),
        ({"store_timeout": 0}, "store_timeout=0"),
        ({"name": ""}, "name=''"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            Idempotency(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="put it on the transport"):
        Pipeline([Idempotency()])
