"""Connections that break before or after what was on its way was carried out: what is told again, and what not.

A slot or a reservation has a name of its own, so that giving it back twice does no harm; nothing is charged twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from resilient_llm import Bulkhead, Pipeline, StoreUnavailableError
from resilient_llm.core.budget import Amount, Cap
from resilient_llm.core.leases import LeaseLimit
from resilient_llm.core.period import RollingPeriod
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_commands import Script
from resilient_llm.stores._redis_line import Line
from resilient_llm.stores.protocol_leases import Lease
from tests.stores.inside import runner_of
from tests.support import until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]
LIMITS = [LeaseLimit("all", 3)]
CAPS = (Cap("tokens", RollingPeriod("day", 86_400.0, 24), 100.0),)
LEASE = 600.0
"""Longer than any test: what is free again was given back."""


class Breaks:
    """Break the connection under the next so many batches that have a script in them, before or after they are sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, carried_out: bool) -> None:
        self.left = 0
        self.carried_out = carried_out
        self._sha = b""
        real = Line.exchange

        async def exchange(line: Line, commands: Sequence[Sequence[Any]]) -> list[Any]:
            if not self.left or not any(self._sha in words for words in commands):
                return await real(line, commands)
            self.left -= 1
            if carried_out:
                await real(line, commands)
            raise ConnectionError("it is gone")

        monkeypatch.setattr(Line, "exchange", exchange)

    def under(self, *names: str, times: int = 1) -> None:
        self._sha, self.left = Script.load(*names).sha, times


@pytest.fixture(params=[True, False], ids=["carried out", "not carried out"])
def breaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Breaks:
    return Breaks(monkeypatch, carried_out=request.param)


def slots(server: Any) -> int:
    with server.admin as admin:
        return sum(admin.zcard(key) for key in admin.keys("*:lease:all"))


async def test_a_slot_whose_release_was_lost_is_given_back_again(
    server: Any, make_store: Make, breaks: Breaks
) -> None:
    store = make_store(server, lease=LEASE)
    pool = store.leases.pool("p", lambda _: None)
    lease = await pool.acquire(LIMITS)
    assert isinstance(lease, Lease)
    assert slots(server) == 1
    breaks.under("_clock", "_lease", "lease_release", times=3)
    pool.release(lease)
    await until(lambda: slots(server) == 0 and not breaks.left)
    assert store.guard.lost == 0


async def test_a_slot_that_may_have_been_granted_is_given_back(
    server: Any, make_store: Make, breaks: Breaks
) -> None:
    store = make_store(server, lease=LEASE)
    pool = store.leases.pool("p", lambda _: None)
    held = await pool.acquire(LIMITS)
    assert isinstance(held, Lease)
    breaks.under("_clock", "_lease", "lease_acquire")
    with pytest.raises(StoreUnavailableError, match="it is gone"):
        await pool.acquire(LIMITS)
    await until(lambda: slots(server) == 1)
    got = await pool.acquire([LeaseLimit("all", 2)])
    assert isinstance(got, Lease), "nothing but what is held counts"


async def test_what_a_call_cost_is_charged_once_however_often_it_is_told(
    server: Any, make_store: Make, breaks: Breaks
) -> None:
    store = make_store(server)
    reservation = (await store.ledger.reserve("k", Amount(0.0, 50.0), CAPS, 0.0)).reservation
    assert reservation is not None
    breaks.under("_clock", "_budget", "budget_settle", times=3)
    store.ledger.settle(reservation, Amount(0.0, 40.0), 0.0, estimated=False)
    await until(lambda: not breaks.left)

    async def is_charged() -> bool:
        (level,) = await store.ledger.levels("k", CAPS, 0.0)
        return (level.spent, level.reserved) == (40.0, 0.0)

    await until(is_charged)
    assert store.guard.lost == 0


async def test_what_a_call_cost_that_was_let_through_without_the_server_is_charged_once_at_most(
    server: Any, make_store: Make, breaks: Breaks
) -> None:
    store = make_store(server, on_store_error="open")
    breaks.under("_clock", "_budget", "budget_reserve")
    reservation = (await store.ledger.reserve("k", Amount(0.0, 50.0), CAPS, 0.0)).reservation
    assert reservation is not None
    sender = runner_of(store).sender
    await until(lambda: not sender.told and not sender.lanes)
    lost = store.guard.lost
    breaks.under("_clock", "_budget", "budget_settle")
    store.ledger.settle(reservation, Amount(0.0, 40.0), 0.0, estimated=False)
    await until(lambda: store.guard.lost == lost + 1)
    (level,) = await store.ledger.levels("k", CAPS, 0.0)
    assert (level.spent, level.reserved) == (40.0 if breaks.carried_out else 0.0, 0.0)


async def test_a_budget_that_may_have_been_reserved_is_given_back(
    server: Any, make_store: Make, breaks: Breaks
) -> None:
    store = make_store(server)
    breaks.under("_clock", "_budget", "budget_reserve")
    with pytest.raises(StoreUnavailableError, match="it is gone"):
        await store.ledger.reserve("k", Amount(0.0, 50.0), CAPS, 0.0)

    async def is_free() -> bool:
        (level,) = await store.ledger.levels("k", CAPS, 0.0)
        return (level.spent, level.reserved) == (0.0, 0.0)

    await until(is_free)


async def test_what_never_got_a_connection_is_told_later_and_once(own_server: Any, make_store: Make) -> None:
    """The server accepts connections and says nothing: that takes as long as it may, and carries nothing out."""
    store = make_store(own_server, timeout=0.1)
    with own_server.frozen():
        for _ in range(20):
            store.runner.send_command("INCR", "resilient_llm:told")
        await until(lambda: not store.guard.closed)
    with own_server.admin as admin:
        await until(lambda: admin.get("resilient_llm:told") is not None)
        assert admin.get("resilient_llm:told") == b"20"
    assert store.guard.lost == 0


async def test_what_is_told_while_the_store_is_given_up_on_is_sent_when_it_is_closed(
    server: Any, make_store: Make
) -> None:
    store = make_store(server)
    assert await store.runner.command("PING") == b"PONG"
    while store.guard.closed:  # a pause of half a second at least, in which nobody asks
        store.guard.failed(store.guard.admit(), "it is gone")
    store.runner.send_command("INCR", "resilient_llm:told")
    await store.aclose()
    with server.admin as admin:
        assert admin.get("resilient_llm:told") == b"1"
    assert store.guard.lost == 0


async def test_what_fails_for_good_is_given_up_when_it_has_become_worthless(
    server: Any, make_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(server, lease=0.5)
    pool = store.leases.pool("p", lambda _: None)
    lease = await pool.acquire(LIMITS)
    assert isinstance(lease, Lease)
    Breaks(monkeypatch, carried_out=False).under("_clock", "_lease", "lease_release", times=1_000_000)
    pool.release(lease)
    await until(lambda: store.guard.lost > 0)
    assert not [each for each in runner_of(store).sender.told if each.again]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_slots_that_an_ended_event_loop_did_not_give_back_are_given_back_in_the_next(server: Any) -> None:
    store = RedisStore(server.url, on_store_error="closed", timeout=5.0, lease=LEASE)
    pipeline = Pipeline([Bulkhead(max_concurrent=2, max_wait=5, store=store)])

    async def work() -> None:
        await asyncio.sleep(0)

    for _ in range(6):  # three times as many as there are slots
        asyncio.run(pipeline.run(work))
    asyncio.run(store.aclose())
    assert slots(server) == 0


def test_the_words_of_a_request_that_is_sent_again_are_those_that_do_no_harm(server: Any) -> None:
    async def main() -> Sequence[Any]:
        async with RedisStore(server.url, timeout=5.0) as store:
            await store.runner.command("PING")
            script = Script("echo", b"return ARGV[1]")
            heard: list[Any] = []
            broken: list[Any] = []
            real = Line.exchange

            async def exchange(line: Line, commands: Sequence[Sequence[Any]]) -> list[Any]:
                if not broken:
                    broken.append(commands)
                    raise ConnectionError("it is gone")
                return await real(line, commands)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Line, "exchange", exchange)
                store.runner.send(script, (), ("first",), heard=heard.append, again=("again",), worth=60)
                await until(lambda: heard)
            return heard

    assert anyio.run(main) == [b"again"]
