"""Cached replies and idempotency records of several processes, and what becomes of calls when their store fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resilient_llm.policies.cache import Cache
from resilient_llm.policies.idempotency import Idempotency
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_replies import RedisReplies
from tests.policies.caching import ASK, STREAM, STREAMED, WHOLE, Setting, served
from tests.streams.scripted import streamed
from tests.support import until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]


def cached(store: RedisStore, *replies: Any, **options: Any) -> Setting:
    return Setting(Cache(store=store.replies, **options), *replies, delay=0.0)


async def test_what_one_process_has_asked_another_is_given(server: Any, make_store: Make) -> None:
    one, other = cached(make_store(server)), cached(make_store(server))
    first, body = await one.ask()
    second, again = await other.ask()
    assert (served(first), served(second), again) == (None, "hit", body)
    assert other.sent == 0


async def test_a_stream_is_given_as_a_stream_by_another(server: Any, make_store: Make) -> None:
    one, other = cached(make_store(server), lambda: streamed(*STREAM)), cached(make_store(server))
    assert (await one.ask(STREAMED))[1] == WHOLE
    response, body = await other.ask(STREAMED)
    assert (served(response), body, other.sent) == ("hit", WHOLE, 0)


async def test_a_request_that_is_sent_again_to_another_process_is_carried_out_once(
    server: Any, make_store: Make
) -> None:
    one, other = (Setting(Idempotency(store=make_store(server).replies), delay=0.0) for _ in range(2))
    headers = {"idempotency-key": "order-7"}
    _, body = await one.ask(headers=headers)
    response, again = await other.ask(headers=headers)
    assert (served(response), again, other.sent) == ("replay", body, 0)
    reused, _ = await other.ask({**ASK, "model": "other"}, headers=headers)
    assert reused.status_code == 422


@pytest.mark.parametrize("mode", ["local", "open", "closed"])
async def test_calls_go_on_without_what_was_kept(own_server: Any, make_store: Make, mode: str) -> None:
    store = make_store(own_server, on_store_error=mode)
    setting = cached(store)
    await setting.ask()
    assert served((await setting.ask())[0]) == "hit"
    own_server.kill()
    for _ in range(20):
        response, _ = await setting.ask()
        assert (response.status_code, served(response)) == (200, None)
    assert setting.sent == 21
    own_server.start()

    async def is_kept_again() -> bool:
        return served((await setting.ask())[0]) == "hit"

    await until(is_kept_again)


async def test_what_is_too_large_is_not_kept_and_neither_is_what_it_replaces(
    server: Any, make_store: Make
) -> None:
    replies = RedisReplies(make_store(server).runner, "p:", max_size=10)
    await replies.put("k", b"0123456789", 100.0)
    assert await replies.get("k") is not None
    await replies.put("k", b"0123456789!", 100.0)
    assert await replies.get("k") is None


async def test_red_04_a_value_without_an_end_is_forgotten(server: Any, make_store: Make) -> None:
    store = make_store(server)
    await store.replies.put("k", b"v", 100.0)
    with server.admin as admin:
        (key,) = admin.keys("*value*")
        admin.persist(key)
        assert await store.replies.get("k") is None
        assert not admin.exists(key)
