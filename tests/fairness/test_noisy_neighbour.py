"""What a tenant that offers fifty times its share does to one that stays within its own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import anyio
import pytest

from resilient_llm import Bulkhead, Call, Reply
from resilient_llm.outcome import SUCCESS
from tests.fairness.traffic import Arrivals, Enter, Street, asgi_door, callable_door, offer, p99, saturating
from tests.support import Door, Nothing

pytestmark = pytest.mark.anyio

SLOTS = 10
SHARE = SLOTS / 2  # calls a second for each of two, when a call takes a second
NOISY = 50 * SLOTS // 2  # callers that are never content, for a share of five slots
CALLS = 500
NEW = 100
SAMPLING = 1.1
"""How much the 99th percentiles of a few hundred figures each may be off."""


def pool(**options: Any) -> Bulkhead:
    return Bulkhead(
        **{"max_concurrent": SLOTS, "shared": SLOTS, "max_queued": 300, "max_wait": 300.0, **options}
    )


def a_second_or_so(seed: int) -> Street:
    """Give a street where a call takes a second on average; its standard deviation is half of that."""
    randoms = {tenant: Random(f"{seed} {tenant}") for tenant in ("quiet", "noisy")}
    return Street(lambda tenant: randoms[tenant].lognormvariate(-0.1116, 0.4724))


async def quiet_day(enter: Enter, arrivals: Arrivals, load_ratio: float, calls: int = CALLS) -> None:
    rate = SHARE * load_ratio
    await offer(enter, "quiet", arrivals=arrivals, rate=rate, calls=calls, hold=1.0, random=Random(11))


async def assert_undisturbed(
    street: Street, enter: Enter, alone: Street, arrivals: Arrivals, load_ratio: float
) -> None:
    """Check all that is promised to a tenant within its share, and to the one beside it.

    The interval of releases is the 99th percentile of what lay between two of them in succession. Of calls that come
    at random some find others of their own before them, and even a queue that always came first would take
    1 / (1 - utilisation) intervals then (as M/M/1 does); quiet's part of all releases is half its load. Waits are
    looked at once quiet is known; until then it earns the credit that a burst draws on.
    """
    async with saturating(enter, "noisy", NOISY):
        began = anyio.current_time()
        await quiet_day(enter, arrivals, load_ratio)
        ended = anyio.current_time()
    quiet = sorted(street.served["quiet"], key=lambda visit: visit.came)
    known = quiet[NEW:]
    intervals = 1.0 if arrivals == "paced" else 1 / (1 - load_ratio / 2)
    interval = street.interval(began, ended)
    assert p99(street.totals("quiet")) <= 2 * p99(alone.totals("quiet"))
    wait = p99([visit.wait for visit in known])
    assert wait <= p99(alone.waits("quiet")) + SAMPLING * intervals * interval
    # Counted in releases: each call waits for one, and one more for each call of its own that it finds waiting.
    late = [visit for visit in known if visit.releases > visit.own_ahead + 1]
    assert len(late) <= 0.01 * len(known)
    assert len(quiet) == len(alone.served["quiet"]), "nobody is lost"
    assert street.peak == SLOTS
    # Nobody starves, and no slot stands free: noisy has all that quiet leaves.
    assert max(len(list(run)) for tenant, run in itertools.groupby(street.order) if tenant == "quiet") <= 25
    done = [visit for visits in street.served.values() for visit in visits if began < visit.ended < ended]
    busy = sum(visit.ended - max(visit.began, began) for visit in done)
    assert busy >= 0.95 * SLOTS * (ended - began)


@pytest.mark.parametrize("load_ratio", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("arrivals", ["paced", "closed loop", "poisson"])
async def test_a_tenant_within_its_share_is_served_as_if_it_were_alone_but_for_a_slots_release(
    arrivals: Arrivals, load_ratio: float
) -> None:
    alone, beside = a_second_or_so(4), a_second_or_so(4)
    await quiet_day(callable_door(alone, pool()), arrivals, load_ratio)
    await assert_undisturbed(beside, callable_door(beside, pool()), alone, arrivals, load_ratio)


async def test_at_the_asgi_door_it_is_the_same() -> None:
    alone, beside = a_second_or_so(5), a_second_or_so(5)
    await quiet_day(asgi_door(alone, pool()), "poisson", 0.5)
    await assert_undisturbed(beside, asgi_door(beside, pool()), alone, "poisson", 0.5)


async def test_two_pipelines_can_draw_on_one_pool() -> None:
    alone, beside = a_second_or_so(6), a_second_or_so(6)
    await quiet_day(callable_door(alone, pool()), "poisson", 0.5)
    bulkhead = pool()
    await assert_undisturbed(beside, callable_door(beside, bulkhead, bulkhead), alone, "poisson", 0.5)


async def test_who_was_away_for_long_does_not_shut_the_others_out_when_it_comes_back() -> None:
    street = Street(lambda _: 1.0)
    enter = callable_door(street, pool())
    async with saturating(enter, "noisy", 50):
        await enter("quiet")
        await anyio.sleep(300)
        before = len(street.order)
        async with saturating(enter, "quiet", 50):
            order = street.order[before:]
    # The ten that run, 24 on credit, and from then on one for each.
    # Tasks of one instant run in any order on trio, so a few more of them may come first.
    assert Counter(order[:34])["noisy"] in range(10, 15)
    assert Counter(order[60:])["quiet"] == pytest.approx(len(order[60:]) / 2, abs=1)


async def test_without_a_shared_pool_it_would_not_be() -> None:
    """One queue for all: the promises above are not kept by themselves."""
    street = a_second_or_so(4)
    enter = callable_door(
        street, Bulkhead(max_concurrent=SLOTS, max_queued=300, max_wait=300.0, key=lambda _: 0)
    )
    async with saturating(enter, "noisy", NOISY):
        await quiet_day(enter, "paced", 0.5, calls=50)
    assert p99(street.waits("quiet")) > 20


async def test_who_offers_fifty_times_its_share_all_the_time_is_refused_and_nobody_else() -> None:
    street = Street(lambda _: 1.0)
    bulkhead = pool(max_queued=30)
    enter = callable_door(street, bulkhead)
    async with anyio.create_task_group() as group:
        group.start_soon(quiet_day, enter, "poisson", 0.5, 60)
        for _ in range(50 * 5 * 20):
            group.start_soon(enter, "noisy")
            await anyio.sleep(1 / (50 * SHARE))
            assert bulkhead.queued() <= 60
    assert street.refused["quiet"] == 0
    assert street.refused["noisy"] > 4_000
    assert len(street.served["quiet"]) == 60
    assert p99(street.totals("quiet")) <= 2


async def test_weights_of_one_two_and_four_are_honoured_within_two_percent() -> None:
    random = Random(2)
    street = Street(lambda _: random.uniform(0.5, 1.5))
    weights = {"one": 1, "two": 2, "four": 4}
    enter = callable_door(street, pool(weights=weights))
    async with saturating(enter, "one", 15), saturating(enter, "two", 15), saturating(enter, "four", 15):
        before = len(street.order)
        await anyio.sleep(210)
        granted = Counter(street.order[before:])
    assert granted.total() > 2_000
    for tenant, weight in weights.items():
        assert granted[tenant] / granted.total() == pytest.approx(weight / 7, rel=0.02)
    assert street.peak == SLOTS


async def test_newcomers_without_end_starve_nobody() -> None:
    street = Street(lambda _: 1.0)
    enter = callable_door(street, pool(max_queued=60, max_queued_total=200))
    async with (
        saturating(enter, "noisy", 50),
        saturating(enter, "other", 50),
        anyio.create_task_group() as group,
    ):
        for number in range(1_500):
            group.start_soon(enter, f"new-{number}")
            await anyio.sleep(1 / 12)  # more than there are slots for
        group.cancel_scope.cancel()
    for tenant in ("noisy", "other"):
        grants = [number for number, each in enumerate(street.order) if each == tenant]
        assert len(grants) > 20
        most = max(later - earlier for earlier, later in itertools.pairwise(grants))
        assert most <= 2 * 200, "there is room for as many"


async def test_a_tenant_at_its_cap_leaves_free_slots_to_others_and_does_not_stand_in_their_way() -> None:
    street = Street(lambda _: 1.0)
    enter = callable_door(street, pool(max_concurrent=7))
    async with saturating(enter, "noisy", NOISY):
        assert street.peak == 7
        await offer(enter, "quiet", arrivals="paced", rate=2.5, calls=100, hold=1.0, random=Random(1))
        assert street.peak <= 10
    assert max(street.waits("quiet")) == 0


class Tokens:
    """The innermost handler: takes a millisecond for each of a tenant's tokens, and keeps the calls."""

    def __init__(self, tokens: dict[str | None, int]) -> None:
        self.tokens = tokens
        self.granted: list[Call] = []

    async def __call__(self, attempt: Call) -> Reply:
        self.granted.append(attempt)
        await anyio.sleep(self.tokens[attempt.tenant] / 1_000)
        attempt.finish(SUCCESS)
        return Reply(200, [], Nothing(), complete=True)


def prompt_of(tokens: int) -> bytes:
    """Give a request whose prompt and answer are estimated at about so many tokens."""
    said = b"x" * 4 * (tokens - 104)
    return b'{"max_tokens": 100, "messages": [{"role": "user", "content": "%s"}]}' % said


@pytest.mark.parametrize("cost", ["tokens", lambda call: len(call.request.body)], ids=["tokens", "function"])
async def test_a_token_heavy_and_a_token_light_tenant_have_equal_shares_by_cost(
    cost: Literal["tokens"] | Callable[[Call], float],
) -> None:
    provider = Tokens({"heavy": 4_000, "light": 200})
    door = Door(pool(cost=cost), provider=provider)

    async def caller(tenant: str, body: bytes) -> None:
        while True:
            await door(tenant=tenant, body=body)

    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(caller, "heavy", prompt_of(4_000))
            group.start_soon(caller, "light", prompt_of(200))
        await anyio.sleep(10)
        before = len(provider.granted)
        await anyio.sleep(200)
        group.cancel_scope.cancel()
    used = Counter[str | None]()
    for call in provider.granted[before:]:
        used[call.tenant] += round(cost(call) if callable(cost) else call.tokens or 0)
    assert used.total() > 400_000
    assert used["heavy"] / used["light"] == pytest.approx(1, abs=0.02)
