"""No place to wait in: who is refused for it, what that says, and that a dry run and a store count places alike."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest

from resilient_llm import Limit, RateLimit, RateLimitedError, Telemetry
from resilient_llm.core.shared_rate import RateCharge, RateDecision
from resilient_llm.stores import MemoryStore
from resilient_llm.stores.memory import MemoryRates
from resilient_llm.telemetry import CallListener
from tests.policies.rate_limiting import Answer, Answers, by_body, refusals, together
from tests.support import Door

pytestmark = pytest.mark.anyio

ONE_A_SECOND: dict[str, Any] = {"requests_per_minute": 60, "window": 1}
FULL: list[dict[str, Any]] = [
    {"max_queued": 0},
    {"max_queued": 2},
    {"max_queued_total": 0},
    {"max_queued_total": 1},
    {"max_queued": 3, "max_wait": 2},
]


def store_or_none(stored: bool) -> MemoryStore | None:
    return MemoryStore() if stored else None


class Told(CallListener):
    """Count what calls are told of."""

    counts: Counter[str]

    def event(self, _call: Any, name: str, _attributes: Any) -> None:
        self.counts[name] += 1

    def rejected(self, *_args: Any, **_options: Any) -> None:
        self.counts["rejected"] += 1

    def waited(self, *_args: Any, **_options: Any) -> None:
        self.counts["waited"] += 1


async def what_is_told(**options: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    listener = type("Mine", (Told,), {"counts": counts})
    limit = RateLimit(**ONE_A_SECOND | options)
    door = Door(limit, provider=Answers(), telemetry=Telemetry(listener=listener))
    await together([door] * 10)
    return counts


@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
@pytest.mark.parametrize("full", FULL, ids=str)
async def test_a_dry_run_says_of_as_many_that_they_wait_and_are_refused(
    full: dict[str, Any], stored: bool
) -> None:
    real = await what_is_told(**full, store=store_or_none(stored))
    dry = await what_is_told(**full, store=store_or_none(stored), dry_run=True)
    assert real["rejected"] > 0
    assert (dry["would_wait"], dry["rejected"]) == (real["waited"], real["rejected"])


@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
async def test_in_a_dry_run_places_are_free_again_when_their_turn_has_come(stored: bool) -> None:
    limit = RateLimit(**ONE_A_SECOND, max_queued=1, store=store_or_none(stored), dry_run=True)
    counts: Counter[str] = Counter()
    listener = type("Mine", (Told,), {"counts": counts})
    door = Door(limit, provider=Answers(), telemetry=Telemetry(listener=listener))
    for _ in range(4):
        await together([door] * 2)  # one passes, or would wait when the next second has begun
        await anyio.sleep(2.0)
    assert counts == {"would_wait": 4}


@pytest.mark.parametrize("key", ["tenant", None])
@pytest.mark.parametrize("most", [0, 1, 2])
async def test_with_a_store_no_more_wait_than_without(most: int, key: Any) -> None:
    limit = RateLimit(**ONE_A_SECOND, key=key, max_queued=most, store=MemoryStore())
    answers = Answers()
    results = await together([partial(Door(limit, provider=answers), tenant="a")] * 6)
    assert len(refusals(results)) == 5 - most
    assert answers.times == pytest.approx(list(range(most + 1)), abs=1e-3)
    assert limit.queued() == 0


async def test_those_who_wait_at_a_store_take_places_of_the_queue_of_all() -> None:
    options = [Limit(key=None, **ONE_A_SECOND)]
    limit = RateLimit(limits=options, max_queued_total=2, store=MemoryStore())
    answers = Answers()
    results = await together([partial(Door(limit, provider=answers), tenant=tenant) for tenant in "abcde"])
    assert answers.tenants == "abc"
    assert ["(max_queued_total=2)" in str(error) for error in refusals(results)] == [True, True]


async def test_those_who_wait_at_a_store_are_counted_until_they_have_gone() -> None:
    limit = RateLimit(requests_per_minute=6, window=10, max_queued=2, store=MemoryStore())
    door = Door(limit, provider=Answers())
    async with anyio.create_task_group() as group:
        for waiting in (0, 1, 2, 2):
            group.start_soon(quietly, door)
            await anyio.wait_all_tasks_blocked()
            assert limit.queued() == waiting
        group.cancel_scope.cancel()
    assert limit.queued() == 0
    with anyio.move_on_after(1):
        await door()  # there is a place again
    assert limit.queued() == 0


async def quietly(door: Door) -> None:
    with suppress(RateLimitedError):
        await door()


class Slow(MemoryRates):
    """Decide at once, and take a while to say so."""

    async def take(self, account: str, charges: Sequence[RateCharge], **options: Any) -> RateDecision:
        decision = await super().take(account, charges, **options)
        await anyio.sleep(0.02)
        return decision


async def test_who_has_waited_in_the_queue_goes_on_waiting_at_the_store() -> None:
    store = MemoryStore()
    store.rates = Slow()
    here, there = (
        Door(RateLimit(**ONE_A_SECOND, max_queued=2, store=store), provider=Answers()) for _ in range(2)
    )
    refused: list[float] = []

    async def call(at: float, door: Door) -> None:
        await anyio.sleep(at)
        try:
            await door(tenant="a")
        except RateLimitedError:
            refused.append(at)

    async with anyio.create_task_group() as group:
        for at in (0.0, 0.1, 0.2):  # one passes, one waits at the store, one behind it
            group.start_soon(call, at, here)
        group.start_soon(call, 1.5, there)  # is before the last one, which does not know
        group.start_soon(call, 1.7, here)
        group.start_soon(call, 2.05, here)  # while that one asks, the queue has room
        group.start_soon(call, 2.11, here)  # and now it has none
    assert refused == [2.11]


@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
async def test_who_finds_no_place_hears_which_option_says_so(stored: bool) -> None:
    limit = RateLimit(**ONE_A_SECOND, max_queued=2, store=store_or_none(stored))
    (error, *_) = refusals(await together([Door(limit, provider=Answers())] * 4))
    assert "it has to wait, and there is no place: 2 calls wait (max_queued=2 for its tenant)" in str(error)
    assert error.retry_after == pytest.approx(3)


async def test_who_has_to_make_way_hears_why() -> None:
    limit = RateLimit(limits=[Limit(key=None, **ONE_A_SECOND)], max_queued=4, max_queued_total=2)
    door = Door(limit, provider=Answers())
    (error,) = refusals(await together([partial(door, tenant=tenant) for tenant in "aaab"]))
    assert "went to a tenant that had fewer of them (max_queued_total=2)" in str(error)


@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
async def test_who_would_wait_too_long_hears_what_allows_no_more(stored: bool) -> None:
    limit = RateLimit(requests_per_minute=6, window=10, max_wait=4, store=store_or_none(stored))
    door = Door(limit, provider=Answers())
    await door()
    with pytest.raises(RateLimitedError, match=r"that takes 10 s, more than max_wait=4 leaves it"):
        await door()
    with pytest.raises(RateLimitedError, match=r"that takes 10 s, more than its deadline leaves it"):
        await door(deadline=anyio.current_time() + 1)
    assert math.isclose(limit.levels(door.calls[0])[0].remaining, 0.0, abs_tol=1e-6)


@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
async def test_who_comes_when_another_is_due_finds_its_place(stored: bool) -> None:
    """Which of the two an event loop comes to first is a matter of chance."""
    doors = [
        Door(RateLimit(**ONE_A_SECOND, max_queued=1, store=store_or_none(stored)), provider=Answers())
        for _ in range(12)
    ]

    async def one_a_second(door: Door, second: int) -> None:
        await anyio.sleep(second)
        await door()

    async with anyio.create_task_group() as group:
        for door in doors:
            for second in (0, 0, 1, 2):
                group.start_soon(one_a_second, door, second)
    assert anyio.current_time() == pytest.approx(3, abs=1e-3)


async def test_who_needs_no_place_is_not_refused_for_want_of_one() -> None:
    """Those who have all the places wait for limits that it does not draw on."""
    limits = [
        Limit(key="tenant", **ONE_A_SECOND),
        Limit(key="model", **ONE_A_SECOND),
        Limit(key=None, requests_per_minute=600),
    ]
    answers = Answers()
    limit = RateLimit(limits=limits, max_queued=1, max_queued_total=2)
    door = Door(limit, provider=answers)
    calls = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")]  # the second waits, and the third
    results = await together([partial(door, tenant=tenant, model=model) for tenant, model in calls])
    assert not refusals(results)
    assert answers.tenants in {"acab", "acba"}
    assert answers.times == pytest.approx([0, 0, 1, 1])


async def test_a_tenant_that_needs_no_place_is_not_refused_since_it_has_none_left() -> None:
    answers = Answers()
    limit = RateLimit(limits=[Limit(key="model", **ONE_A_SECOND)], max_queued=1)
    door = Door(limit, provider=answers)
    results = await together([partial(door, tenant="a", model=model) for model in "xxyxy"])
    assert [str(error.limit) for error in refusals(results)] == ["requests of model"] * 2
    assert [attempt.model for _, attempt in answers.attempts] == ["x", "y", "x"]
    assert limit.queued() == 0


@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
async def test_who_finds_no_place_since_others_have_it_hears_what_they_wait_for(stored: bool) -> None:
    limits = [Limit(key="tenant", requests_per_minute=60), Limit(key=None, requests_per_minute=6, window=10)]
    limit = RateLimit(limits=limits, max_queued_total=1, store=store_or_none(stored))
    door = Door(limit, provider=Answers())
    await door(tenant="a")
    async with anyio.create_task_group() as group:
        group.start_soon(partial(door, tenant="a"))
        await anyio.sleep(4)
        with pytest.raises(RateLimitedError, match=r"max_queued_total=1") as refused:
            await door(tenant="b")
    assert refused.value.limit == "requests of account"
    assert refused.value.retry_after == pytest.approx(16, abs=1e-3), "6 s until a's is served, and 10 more"


async def test_who_has_waited_for_others_in_vain_hears_what_for() -> None:
    limits = [Limit(key="tenant", requests_per_minute=60), Limit(key=None, tokens_per_minute=60, window=10)]
    limit = RateLimit(limits=limits, weights={"a": 1e6}, max_wait=25, estimate=by_body)
    door = Door(limit, provider=Answers())

    async def again_and_again() -> None:
        while True:
            await door(tenant="a", body=b"10")

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(again_and_again)
        await anyio.sleep(0.5)
        await door(tenant="b", body=b"1")  # when a has been served once, and b owes for it as long as a waits
        assert anyio.current_time() == pytest.approx(11)
        with pytest.raises(RateLimitedError, match="others come first") as refused:
            await door(tenant="b", body=b"1")
        group.cancel_scope.cancel()
    error = refused.value
    assert error.limit == "tokens of account"
    assert error.remaining >= 1, "there would be enough for it, were it alone"
    assert error.retry_after == pytest.approx(6, abs=1e-3), "what a waits for from 31 to 41, and a token more"


async def test_nobody_is_told_to_come_back_at_once() -> None:
    """Whatever a call is refused for: some limits at random, in which many wait for few places."""
    draw = random.Random(1)
    limits = [
        Limit(key="tenant", tokens_per_minute=600, window=2),
        Limit(key="model", requests_per_minute=6_000, window=1),  # never short
        Limit(key=None, tokens_per_minute=1_200, window=2),
    ]
    limit = RateLimit(
        limits=limits, max_wait=3, max_queued=4, max_queued_total=10, estimate=by_body, weights={"a": 50.0}
    )
    door = Door(limit, provider=Answers())
    refused: list[RateLimitedError] = []

    async def call() -> None:
        body = str(draw.choice([1, 1, 2, 5, 15, 20])).encode()
        try:
            await door(tenant=draw.choice("aabcde"), model=draw.choice("xxy"), body=body)
        except RateLimitedError as error:
            refused.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(800):
            await anyio.sleep(draw.expovariate(10))
            group.start_soon(call)
    assert len(refused) > 50
    assert {error.limit for error in refused} == {"tokens of tenant", "tokens of account"}
    assert all(error.retry_after for error in refused)


async def test_a_dry_run_counts_those_who_would_wait_now() -> None:
    told: list[str] = []

    class Listens(CallListener):
        def rejected(self, _call: Any, error: Exception, *, dry_run: bool = False) -> None:
            assert dry_run
            told.append(str(error))

    limit = RateLimit(**ONE_A_SECOND, max_wait=2, dry_run=True)
    door = Door(limit, provider=Answers(), telemetry=Telemetry(listener=Listens))
    await together([door] * 4)
    await anyio.sleep(1)
    await door(deadline=anyio.current_time() + 0.5)
    assert [f"{number} calls wait" in why for number, why in zip((2, 1), told, strict=True)] == [True, True]


async def test_who_is_held_up_by_nobody_is_not_told_of_others() -> None:
    """The provider has said meanwhile that it gives nothing for another half a minute."""
    headers = [(b"x-ratelimit-remaining-requests", b"0"), (b"x-ratelimit-reset-requests", b"30s")]
    answers = Answers(Answer(duration=1.0, headers=headers))
    limit = RateLimit(key="target", requests_per_minute=6, window=20, max_wait=12)
    door = Door(limit, provider=answers)
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(door)
        await anyio.sleep(0.5)
        with pytest.raises(RateLimitedError, match=r"that takes 21 s, more than max_wait=12") as refused:
            await door()  # it would have been 9.5 s
    assert "others" not in str(refused.value)
    assert refused.value.retry_after == pytest.approx(21, abs=1e-3)
