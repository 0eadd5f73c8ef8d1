"""The public checks of replies and budgets, run against both stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from resilient_llm.policies.ledger import MemoryLedger
from resilient_llm.policies.reply_store import MemoryReplyStore
from resilient_llm.stores import MemoryStore, RedisStore
from resilient_llm.testing.stores_values import LEDGER_CHECKS, REPLY_CHECKS, LedgerCheck, ReplyCheck
from tests.stores.conftest import on_both

pytestmark = pytest.mark.anyio

CHECKS = pytest.mark.parametrize("check", [*REPLY_CHECKS, *LEDGER_CHECKS], ids=lambda check: check.__name__)


class Policies:
    """What policies keep by themselves, in the place of a store."""

    def __init__(self) -> None:
        self.replies = MemoryReplyStore()
        self.ledger = MemoryLedger()


@CHECKS
@pytest.mark.parametrize("kind", [MemoryStore, Policies])
async def test_what_is_in_memory_conforms(check: ReplyCheck | LedgerCheck, kind: Callable[[], Any]) -> None:
    store = kind()
    await check(lambda: store)


@CHECKS
@pytest.mark.realtime
@on_both
async def test_the_redis_store_conforms(
    check: ReplyCheck | LedgerCheck, server: Any, make_store: Callable[..., RedisStore]
) -> None:
    await check(lambda: make_store(server))


@CHECKS
@pytest.mark.realtime
async def test_it_conforms_over_a_client_that_decodes(
    check: ReplyCheck | LedgerCheck, server: Any, make_store: Callable[..., RedisStore]
) -> None:
    async with Redis.from_url(server.url, protocol=3, decode_responses=True) as client:
        await check(lambda: make_store(client, clock="client"))
