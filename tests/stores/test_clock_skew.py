"""RED-05: clocks of clients that are wrong by half a minute, each time they are read in another way, change nothing.

What every store must do, in `resilient_llm.testing`, is done by stores whose wall clock cannot be relied on.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest

from resilient_llm.core.leases import LeaseLimit
from resilient_llm.core.shared_rate import RateCharge
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_line import Line
from resilient_llm.testing.stores import RATE_CHECKS
from resilient_llm.testing.stores_circuits import CIRCUIT_CHECKS
from resilient_llm.testing.stores_leases import LEASE_CHECKS
from resilient_llm.testing.stores_values import LEDGER_CHECKS, REPLY_CHECKS
from tests.stores.conftest import Server

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]
CHECKS: list[Callable[[Any], Awaitable[None]]] = [
    *RATE_CHECKS,
    *LEASE_CHECKS,
    *CIRCUIT_CHECKS,
    *REPLY_CHECKS,
    *LEDGER_CHECKS,
]
SKEW = 30.0


@pytest.fixture
def wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    errors = itertools.cycle([SKEW, -SKEW, 0.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(errors))


@pytest.mark.usefixtures("wrong_clock")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_stores_conform_without_a_right_clock(
    check: Callable[[Any], Awaitable[None]], server: Server, make_store: Make
) -> None:
    await check(lambda: make_store(server))


def times_in(commands: Iterable[Sequence[Any]]) -> list[float]:
    """Give all that may be a time of about now, in seconds, milliseconds or microseconds, as text or packed."""
    now = time.time()
    numbers: list[float] = []
    for word in itertools.chain.from_iterable(commands):
        if isinstance(word, bytes):
            whole = word[: len(word) // 8 * 8]
            numbers += struct.unpack(f"<{len(whole) // 8}d", whole)
            word = word.decode("latin-1")  # noqa: PLW2901
        try:
            numbers.append(float(word))
        except ValueError:
            continue
    return [number for number in numbers for unit in (1, 1e3, 1e6) if abs(number / unit - now) < 1_000]


async def use(store: RedisStore) -> None:
    """Send something of every kind."""
    await store.rates.take("account", [RateCharge("k", 10.0, 1.0, 1.0, own=True)], most_wait=1.0, mode="h")
    pool = store.leases.pool("p", lambda _: None)
    limit = [LeaseLimit("all", 1)]
    await pool.acquire(limit)
    await pool.acquire(limit, wait=True)
    pool.vote(3.0, lambda _: None)
    store.leases._renew_since(float("inf"), store.leases.loop.time())
    await store.replies.put("key", b"value", 60.0)
    await store.replies.get("key")


@pytest.mark.parametrize("clock", ["server", "client"])
async def test_no_time_of_a_client_s_is_ever_sent(
    server: Server, make_store: Make, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    sent: list[Sequence[Any]] = []
    exchange = Line.exchange

    async def record(line: Line, commands: Sequence[Sequence[Any]]) -> list[Any]:
        sent.extend(commands)
        return await exchange(line, commands)

    monkeypatch.setattr(Line, "exchange", record)
    store = make_store(server, clock=clock)
    await use(store)
    for check in (CIRCUIT_CHECKS[0], LEDGER_CHECKS[0]):
        await check(lambda: make_store(server, clock=clock))
    assert len(sent) > 10
    # Of what is sent with clock="client" it is found.
    assert bool(times_in(sent)) == (clock == "client")
