"""A budget among other policies: what is reserved, settled and refused, for whom, and what is told."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import Awaitable, Hashable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import anyio
import httpx
import pytest
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm import (
    AttemptError,
    BudgetExceededError,
    Bulkhead,
    BulkheadFullError,
    Call,
    ConfigurationError,
    Outcome,
    Pipeline,
    RateLimit,
    Retry,
    Router,
    Target,
    TokenEstimate,
    Usage,
    Verdict,
    ambient,
)
from resilient_llm.core.budget import Amount, BudgetLevel, Cap, Decision, Reservation
from resilient_llm.core.period import RollingPeriod
from resilient_llm.httpx import ResilientTransport
from resilient_llm.policies._calendar import CalendarPeriod
from resilient_llm.policies.budget import Budget
from resilient_llm.policies.ledger import MemoryLedger
from resilient_llm.pricing import Price
from resilient_llm.testing import FakeProvider, run_virtual
from tests.policies.rate_limiting import Answer, Answers, by_body, together
from tests.signals import Recording
from tests.support import BAD_REQUEST, FAILURE, THROTTLED, Door, cancel_at_every_await
from tests.telemetry.observed import telemetry_of

pytestmark = pytest.mark.anyio

AMBIGUOUS = replace(FAILURE, ambiguous=True)
DOLLAR_A_TOKEN = Price(input=1e6, output=1e6)
HOUR = 3_600.0
NOT_A_NUMBER: Any = math.nan
WORDS: Any = "many"


def budget(**options: object) -> Budget:
    """Make a budget whose calls say in their bodies how many tokens, and dollars, they will take."""
    given: dict[str, object] = {"estimate": by_body, "price": DOLLAR_A_TOKEN, "usd_per_day": 1_000}
    return Budget(**(given | options))  # type: ignore[arg-type]


async def left(one: Budget, key: Hashable = None) -> float:
    return (await one.spent(key))[0].remaining


async def spent(one: Budget, key: Hashable = None) -> tuple[float, float, float]:
    level = (await one.spent(key))[0]
    return level.spent, level.reserved, level.estimated


# What a call keeps


@pytest.mark.parametrize(
    ("answer", "dollars", "estimated"),
    [
        pytest.param(Answer(tokens=150), 150, 0, id="less was used"),
        pytest.param(Answer(tokens=700), 700, 0, id="more was used"),
        pytest.param(Answer(tokens=0), 0, 0, id="nothing was used"),
        pytest.param(Answer(), 400, 400, id="usage unknown"),
        pytest.param(Answer(usage=Usage(input_tokens=5, estimated=True)), 400, 400, id="usage partly known"),
        pytest.param(
            Answer(usage=Usage(input_tokens=500, output_tokens=400, estimated=True)),
            900,
            900,
            id="known to be more",
        ),
        pytest.param(
            Answer(usage=Usage(input_tokens=NOT_A_NUMBER, output_tokens=1)), 400, 400, id="nonsense"
        ),
        pytest.param(Answer(usage=Usage(input_tokens=WORDS, output_tokens=1)), 400, 400, id="words"),
        pytest.param(Answer(outcome=THROTTLED), 0, 0, id="throttled"),
        pytest.param(Answer(outcome=BAD_REQUEST), 0, 0, id="refused by the provider"),
        pytest.param(Answer(outcome=FAILURE), 0, 0, id="failed, nothing done"),
        pytest.param(Answer(outcome=AMBIGUOUS), 400, 400, id="failed, perhaps done"),
    ],
)
async def test_what_a_call_keeps(answer: Answer, dollars: float, estimated: float) -> None:
    one = budget()
    door = Door(one, provider=Answers(answer, marks_sent=True))
    try:
        await door(body=b"400")
    except AttemptError:
        assert not answer.outcome.ok
    assert await spent(one) == (dollars, 0, estimated)


async def test_while_it_runs_its_estimate_is_reserved() -> None:
    one = budget()
    door = Door(one, provider=Answers(duration=10.0))
    async with anyio.create_task_group() as group:

        async def call() -> None:
            await door(body=b"400")

        group.start_soon(call)
        await anyio.sleep(1)
        assert await spent(one) == (0, 400, 0)
    assert await spent(one) == (400, 0, 400)


async def test_what_the_provider_bills_is_priced_by_kind_of_token() -> None:
    one = Budget(usd_per_day=1, price=Price(input=1, output=10, cached=0.1))
    usage = Usage(input_tokens=1_000_000, output_tokens=10_000, cached_tokens=900_000)
    await Door(one, provider=Answers(Answer(usage=usage)))(body=b'{"prompt": "hi", "max_tokens": 100}')
    assert (await spent(one))[0] == pytest.approx(0.1 + 0.09 + 0.1)


async def test_the_estimate_is_the_prompt_and_all_the_answer_may_be() -> None:
    one = Budget(usd_per_day=1, tokens_per_day=1e6, price=Price(input=1, output=10))
    body = json.dumps({"prompt": "x" * 4_000, "max_tokens": 300}).encode()
    await Door(one, provider=Answers())(body=body)
    dollars, tokens = await one.spent(None)
    assert dollars.spent == pytest.approx((1_000 * 1 + 300 * 10) / 1e6)
    assert tokens.spent == 1_300


async def test_with_a_router_it_is_what_the_attempts_have_cost() -> None:
    # The first attempt fails and is billed all the same, the second one is dearer.
    one = Budget(usd_per_day=1)
    router = Router(
        [
            Target(name="a", price=Price(input=1, output=1), weight=100),
            Target(name="b", price=Price(input=2, output=2), weight=1),
        ],
        random=random.Random(1),
    )
    failed = Answer(tokens=1_000, outcome=AMBIGUOUS)
    door = Door(one, Retry(), router, provider=Answers(failed, Answer(tokens=1_000), marks_sent=True))
    await door(body=b'{"prompt": "hi"}')
    assert door.calls[0].cost == pytest.approx(0.003)
    assert await spent(one) == (door.calls[0].cost, 0, 0)


async def test_refused_further_in_it_is_given_back() -> None:
    one = budget()
    full = Bulkhead(max_concurrent=1, max_queued=0)
    door = Door(one, full, provider=Answers(duration=10.0))
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await anyio.sleep(1)
        with pytest.raises(BulkheadFullError):
            await door(body=b"400")
        assert (await spent(one))[1] == 0


async def test_cancelled_before_it_is_sent_it_is_given_back() -> None:
    one = budget()
    door = Door(one, Bulkhead(max_concurrent=1), provider=Answers(duration=10.0))
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await anyio.sleep(1)
        with anyio.move_on_after(1):
            await door(body=b"400")
    assert (await spent(one))[:2] == (0, 0)


async def test_cancelled_after_it_was_sent_it_keeps_its_estimate() -> None:
    one = budget()
    door = Door(one, provider=Answers(duration=10.0, marks_sent=True))
    with anyio.move_on_after(1):
        await door(body=b"400")
    assert await spent(one) == (400, 0, 400)


# Who is refused, and what is said


async def test_over_the_cap_is_refused_and_says_all_there_is_to_say() -> None:
    one = budget()
    provider = Answers(Answer(tokens=700))
    door = Door(one, provider=provider)
    await door(body=b"500")
    with pytest.raises(BudgetExceededError) as refused:
        await door(body=b"301")
    error = refused.value
    assert len(provider.attempts) == 1
    assert error.level == BudgetLevel(
        "usd_per_day", 1_000, 700, 0, 0, error.level.resets_in if error.level else 0
    )
    assert error.retry_after is not None
    assert 24 * HOUR <= error.retry_after <= 25 * HOUR
    assert (error.status, error.reason, error.name) == (429, "budget_exceeded", "budget")
    assert str(error) == (
        f"budget: usd_per_day is $1000, of which $700 is spent and $0 reserved; "
        f"in {math.ceil(error.retry_after)} s it has room for this call, of $301"
    )
    await door(body=b"300")


async def test_what_exceeds_the_cap_has_no_time_to_come_back() -> None:
    with pytest.raises(BudgetExceededError, match="it never has room for this call, of \\$1001") as refused:
        await Door(budget(), provider=Answers())(body=b"1001")
    assert refused.value.retry_after is None


async def test_it_comes_back_when_it_is_said_to() -> None:
    one = budget()
    door = Door(one, provider=Answers(Answer(tokens=1_000), Answer(tokens=10)))
    await door(body=b"400")
    with pytest.raises(BudgetExceededError) as refused:
        await door(body=b"1")
    assert refused.value.retry_after is not None
    await anyio.sleep(refused.value.retry_after - 1)
    with pytest.raises(BudgetExceededError):
        await door(body=b"1")
    await anyio.sleep(1)
    await door(body=b"1")


async def test_calls_at_once_never_spend_more_together_than_there_is() -> None:
    one = budget()
    provider = Answers(duration=1.0)
    door = Door(one, provider=provider)
    results = await together([lambda: door(body=b"300")] * 10)
    assert len(provider.attempts) == 3
    assert sum(isinstance(result, BudgetExceededError) for result in results) == 7
    first = next(result for result in results if isinstance(result, BudgetExceededError))
    assert first.retry_after == 1  # nothing is spent yet, there are only calls in flight


async def test_each_tenant_has_its_own() -> None:
    one = budget()
    door = Door(one, provider=Answers())
    for tenant in ("a", "b"):
        await door(tenant=tenant, body=b"900")
        with pytest.raises(BudgetExceededError):
            await door(tenant=tenant, body=b"900")
    assert (await left(one, "a"), await left(one, "c")) == (100, 1_000)


async def test_tokens_and_dollars_days_and_months() -> None:
    one = budget(usd_per_day=100, usd_per_month=150, tokens_per_day=None, tokens_per_month=1e6)
    door = Door(one, provider=Answers())
    await door(body=b"100")
    await anyio.sleep(25 * HOUR)
    with pytest.raises(BudgetExceededError, match="usd_per_month") as refused:
        await door(body=b"60")
    assert refused.value.retry_after == pytest.approx(30 * 24 * HOUR, rel=0.05)
    assert [level.name for level in await one.spent(None)] == [
        "usd_per_day",
        "usd_per_month",
        "tokens_per_month",
    ]


@pytest.mark.parametrize(
    "allowance",
    [
        {"big": 1_000, "none": None, "*": 10},
        {"big": 1_000, "none": math.inf, "*": 10},
        lambda key: {"big": 1_000, "none": None}.get(key, 10),
    ],
    ids=["mapping", "infinite", "function"],
)
async def test_a_cap_may_be_one_for_each(allowance: object) -> None:
    one = budget(usd_per_day=allowance)
    door = Door(one, provider=Answers())
    await door(tenant="big", body=b"999")
    await door(tenant="small", body=b"10")
    await door(tenant="none", body=b"1000000")
    for tenant in ("big", "small"):
        with pytest.raises(BudgetExceededError):
            await door(tenant=tenant, body=b"2")
    assert (await one.spent("none"))[0].limit == math.inf
    assert (await spent(one, "none"))[0] == 1_000_000  # counted all the same


@pytest.mark.parametrize("answer", [ZeroDivisionError(), -1, "much", float("nan")])
async def test_a_function_that_fails_breaks_no_call(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    def allowance(_key: object) -> float:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    await Door(budget(usd_per_day=allowance), provider=Answers())(body=b"400")
    assert "usd_per_day" in caplog.text


async def test_an_estimate_of_nothing_passes_until_all_is_spent() -> None:
    one = budget(estimate=lambda _call: 0)
    door = Door(one, provider=Answers(Answer(tokens=900), Answer(tokens=200)))
    await door()
    await door()
    assert await spent(one) == (1_100, 0, 0)
    with pytest.raises(BudgetExceededError):
        await door()


# Prices


async def test_a_call_whose_price_nobody_knows_is_refused() -> None:
    one = Budget(usd_per_day=1)
    with pytest.raises(BudgetExceededError, match=r"no price is known for model 'no-such-model'.*price="):
        await Door(one, provider=Answers())(model="no-such-model", body=b'{"prompt": "hi"}')


async def test_or_let_through_and_counted_in_tokens() -> None:
    recording = Recording()
    one = Budget(usd_per_day=1, tokens_per_day=1_000, unpriced="allow")
    door = Door(one, provider=Answers(Answer(tokens=100)), telemetry=telemetry_of(recording))
    await door(model="no-such-model", body=b'{"prompt": "hi"}')
    dollars, tokens = await one.spent(None)
    assert (dollars.spent, tokens.spent) == (0, 100)
    assert "resilient_llm.budget.unpriced" in recording.spans.one("chat").event_names()


async def test_a_request_without_a_prompt_needs_no_price() -> None:
    await Door(Budget(usd_per_day=1), provider=Answers())(model="no-such-model", body=b"")


async def test_prices_by_call_and_a_function_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def price(call: Call) -> Price | None:
        return {"cheap": Price(input=1e6, output=1e6), "dear": Price(input=2e6, output=2e6)}[call.model or ""]

    one = budget(price=price)
    door = Door(one, provider=Answers())
    await door(model="cheap", body=b"100")
    await door(model="dear", body=b"100")
    assert (await spent(one))[0] == 300
    with pytest.raises(BudgetExceededError, match="no price"):
        await door(model="unheard of", body=b"1")
    assert "price=" in caplog.text


async def test_published_prices_are_looked_up() -> None:
    pytest.importorskip("genai_prices")
    one = Budget(usd_per_day=1)
    usage = Usage(input_tokens=1_000_000, output_tokens=0)
    await Door(one, provider=Answers(Answer(usage=usage)))(model="gpt-4o", body=b'{"prompt": "hi"}')
    assert (await spent(one))[0] == pytest.approx(2.5)


class Pricey:
    """Routes nothing, but knows what would be the dearest."""

    async def __call__(self, call: Call, call_next):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return await call_next(call)

    def dearest(self, model: str | None) -> Price | None:
        return DOLLAR_A_TOKEN if model == "logical" else None


async def test_who_knows_the_dearest_target_is_asked() -> None:
    one = budget(price=None)
    await Door(one, Pricey(), provider=Answers())(model="logical", body=b"70")
    assert (await spent(one))[0] == 70


async def test_a_budget_of_a_target_sends_attempts_elsewhere() -> None:
    one = budget(key="target")
    router = Router([Target(name="a", policies=[one], weight=100), Target(name="b")], random=random.Random(1))
    provider = Answers()
    door = Door(Retry(), router, provider=provider)
    for _ in range(3):
        await door(body=b"400")
    assert [attempt.target.name for _, attempt in provider.attempts] == ["a", "a", "b"]


# Calendars


def zone_of(name: str) -> tzinfo:
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except ZoneInfoNotFoundError:
        pytest.skip("this system has no time zones")


def _at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone_of(zone))


@pytest.mark.parametrize(
    ("name", "now", "zone", "ends_in"),
    [
        ("day", "2026-03-01T00:00:00", "UTC", 24 * HOUR),
        ("day", "2026-03-01T23:59:59", "UTC", 1),
        ("day", "2026-03-29T00:00:00", "Europe/Berlin", 23 * HOUR),
        ("day", "2026-10-25T00:00:00", "Europe/Berlin", 25 * HOUR),
        ("month", "2026-02-01T00:00:00", "UTC", 28 * 24 * HOUR),
        ("month", "2026-12-31T12:00:00", "UTC", 12 * HOUR),
    ],
)
def test_the_calendars_days_and_months(name: str, now: str, zone: str, ends_in: float) -> None:
    at = CalendarPeriod(name, lambda: _at(now, zone)).at(0.0)  # type: ignore[arg-type]
    assert at.ends_in == ends_in


@given(start=st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)), step=st.floats(0, 1e7))  # noqa: DTZ001
def test_numbers_of_days_and_months_rise_with_time(start: datetime, step: float) -> None:
    zone = zone_of("America/New_York")
    times = [
        start.replace(tzinfo=zone),
        (start.replace(tzinfo=UTC) + timedelta(seconds=step)).astimezone(zone),
    ]
    for name in ("day", "month"):
        numbers = [CalendarPeriod(name, lambda time=time: time).at(0.0).slice for time in sorted(times)]  # type: ignore[misc]
        assert numbers == sorted(numbers)


async def test_with_a_calendar_a_day_ends_at_midnight() -> None:
    begin = anyio.current_time()
    evening = _at("2026-03-01T22:00:00")
    one = budget(calendar=lambda: evening + timedelta(seconds=anyio.current_time() - begin))
    door = Door(one, provider=Answers())
    await door(body=b"900")
    with pytest.raises(BudgetExceededError) as refused:
        await door(body=b"900")
    assert refused.value.retry_after == pytest.approx(2 * HOUR)
    await anyio.sleep(2 * HOUR)
    await door(body=b"900")


# Telling of it


async def test_a_refusal_is_told_and_a_dry_run_tells_what_it_would_have_been() -> None:
    recording = Recording()
    one = budget(dry_run=True)
    door = Door(one, provider=Answers(), telemetry=telemetry_of(recording))
    await door(body=b"900")
    await door(body=b"900")
    assert (await spent(one))[0] == 1_800
    [event] = [
        event for event in recording.spans.named("chat")[1].events if event.name == "resilient_llm.rejected"
    ]
    assert event.attributes == {
        "resilient_llm.reason": "budget_exceeded",
        "resilient_llm.limiter.name": "budget",
        "resilient_llm.dry_run": True,
    }


async def test_a_warning_at_80_percent(caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording()
    one = budget()
    door = Door(one, provider=Answers(), telemetry=telemetry_of(recording))
    with caplog.at_level(logging.WARNING, "resilient_llm"):
        for dollars in (b"700", b"150", b"50", b"50"):
            await door(tenant="acme", body=dollars)
    warned = ["resilient_llm.budget.warning" in span.event_names() for span in recording.spans.named("chat")]
    assert warned == [False, False, True, False]
    [event] = [
        event
        for event in recording.spans.named("chat")[2].events
        if event.name == "resilient_llm.budget.warning"
    ]
    assert event.attributes["resilient_llm.budget.spent_ratio"] == pytest.approx(0.85)
    assert [record.getMessage() for record in caplog.records] == [
        "budget='budget' key='acme' cap=usd_per_day spent=850 limit=1000"
    ]


async def test_what_remains_is_a_gauge() -> None:
    recording = Recording()
    one = budget(tokens_per_month=10_000)
    door = Door(one, provider=Answers(), telemetry=telemetry_of(recording))
    await door(tenant="a", body=b"900")
    await door(tenant="b", body=b"200")
    remaining = {
        (
            point.attributes["resilient_llm.limiter.name"],
            point.attributes["resilient_llm.limit.unit"],
        ): point.value
        for point in recording.points
        if point.name == "resilient_llm.limit.remaining"
    }
    assert remaining == {("budget:day", "usd"): 100, ("budget:month", "tokens"): 9_100}


async def test_at_the_client_door_it_is_a_429_that_sdks_do_not_retry() -> None:
    one = Budget(usd_per_day=0.001, price=Price(input=1, output=10))
    transport = ResilientTransport(FakeProvider().transport(), policies=[one])
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1") as client:
        with ambient(tenant="acme"):
            statuses = []
            for _ in range(3):
                body = {"model": "gpt-4o", "max_tokens": 95, "messages": [{"role": "user", "content": "hi"}]}
                response = await client.post("/chat/completions", json=body)
                statuses.append(response.status_code)
                if response.status_code != 200:
                    assert response.json()["error"]["code"] == "budget_exceeded"
                    assert response.headers["x-should-retry"] == "false"
    assert statuses[0] == 200
    level = (await one.spent("acme"))[0]
    assert level.estimated == level.reserved == 0  # the fake provider says what it used
    assert 0 < level.spent <= 0.001


async def test_it_stands_beside_a_rate_limit_and_uses_its_estimate() -> None:
    counted = 0

    def estimate(_call: Call) -> float:
        nonlocal counted
        counted += 1
        return 10

    limit = RateLimit(tokens_per_minute=1_000, estimate=estimate)
    await Door(limit, budget(estimate=estimate), provider=Answers())()
    assert counted == 1


# Ledgers


class SlowLedger:
    """A ledger that others might keep: every step of it takes a while."""

    def __init__(self) -> None:
        self.inner = MemoryLedger()
        self.settled = 0

    async def reserve(
        self, key: Hashable, amount: Amount, caps: Sequence[Cap], now: float, *, enforce: bool = True
    ) -> Decision:
        await anyio.sleep(0.1)
        decision = await self.inner.reserve(key, amount, caps, now, enforce=enforce)
        try:
            await anyio.sleep(0.1)
        except BaseException:
            if decision.reservation is not None:
                self.inner.refund(decision.reservation, now)
            raise
        return decision

    def settle(
        self, reservation: Reservation, spent: Amount, now: float, *, estimated: bool
    ) -> Awaitable[None] | None:
        return self._settle(reservation, spent, now, estimated)

    async def _settle(self, reservation: Reservation, spent: Amount, now: float, estimated: bool) -> None:
        await anyio.sleep(0.1)
        self.inner.settle(reservation, spent, now, estimated=estimated)
        self.settled += 1

    def refund(self, reservation: Reservation, now: float) -> Awaitable[None] | None:
        return self._refund(reservation, now)

    async def _refund(self, reservation: Reservation, now: float) -> None:
        await anyio.sleep(0.1)
        self.inner.refund(reservation, now)

    async def levels(self, key: Hashable, caps: Sequence[Cap], now: float) -> tuple[BudgetLevel, ...]:
        return await self.inner.levels(key, caps, now)


@pytest.mark.parametrize("ledger", [MemoryLedger, SlowLedger])
async def test_nothing_is_held_whenever_a_call_is_cancelled(
    ledger: type[MemoryLedger | SlowLedger],
) -> None:
    kept = ledger()
    one = budget(ledger=kept, usd_per_day=1_000_000)
    door = SettlingDoor(Door(one, Bulkhead(max_concurrent=1), provider=Answers(duration=1.0)))

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(door)
            await anyio.sleep(0.5)
            await door()

    async def check() -> None:
        assert (await spent(one))[1] == 0

    assert await cancel_at_every_await(scenario, check) >= 4


class SettlingDoor:
    """Await what the end of a call leaves to await, as doors must."""

    def __init__(self, door: Door) -> None:
        self.door = door

    async def __call__(self) -> None:
        before = len(self.door.calls)
        try:
            await self.door(body=b"400")
        finally:
            for call in self.door.calls[before:]:
                if call.unsettled:
                    await call.settle()


async def test_a_slow_ledger_settles_all_the_same() -> None:
    ledger = SlowLedger()
    one = budget(ledger=ledger)
    await SettlingDoor(Door(one, provider=Answers(Answer(tokens=150))))()
    assert ledger.settled == 1
    assert await spent(one) == (150, 0, 0)


async def test_a_reservation_is_settled_or_refunded_once() -> None:
    ledger = MemoryLedger()
    caps = budget()._caps(None)
    kept = (await ledger.reserve("key", Amount(100), caps, 0)).reservation
    other = (await ledger.reserve("key", Amount(50), caps, 0)).reservation
    assert kept is not None
    assert other is not None
    for _ in range(2):
        ledger.settle(kept, Amount(70), 0, estimated=False)
        ledger.refund(kept, 0)
    [level] = await ledger.levels("key", caps, 0)
    assert (level.spent, level.reserved) == (70, 50)


async def test_budgets_of_one_name_share_a_ledger_and_of_two_names_do_not() -> None:
    ledger = MemoryLedger()
    first, second, other = budget(ledger=ledger), budget(ledger=ledger), budget(ledger=ledger, name="other")
    for one in (first, second, other):
        await Door(one, provider=Answers())(body=b"400")
    assert (await left(first), await left(second), await left(other)) == (200, 200, 600)


async def test_keys_are_bounded_and_idle_ones_forgotten() -> None:
    ledger = MemoryLedger(max_keys=100)
    one = budget(ledger=ledger)
    door = Door(one, provider=Answers())
    for number in range(300):
        await door(tenant=f"tenant {number}", body=b"1")
        await anyio.sleep(HOUR)
    assert len(ledger) <= 101
    assert (await spent(one, "tenant 299"))[0] == 1


async def test_keys_beyond_the_bound_share_one_account() -> None:
    recording = Recording()
    one = budget(max_keys=2)
    door = Door(one, provider=Answers(), telemetry=telemetry_of(recording))
    for tenant in "abcd":
        await door(tenant=tenant, body=b"400")
    with pytest.raises(BudgetExceededError):
        await door(tenant="e", body=b"400")
    assert (await spent(one, "c"))[0] == 800
    overflowed = [
        "resilient_llm.keys_overflow" in span.event_names() for span in recording.spans.named("chat")
    ]
    assert overflowed == [False, False, True, True, True]


def test_what_is_spent_outlives_an_event_loop() -> None:
    one = budget()

    async def spend(dollars: bytes) -> None:
        await Door(one, provider=Answers())(body=dollars)

    async def leave_one_running() -> None:
        door = Door(one, provider=Answers(duration=math.inf))
        with anyio.move_on_after(1):
            await door(body=b"50")
        reservation = await one._ledger.reserve(
            (one.name, None), Amount(25), one._caps(None), anyio.current_time()
        )
        assert reservation.reservation is not None  # and never settled: its loop is no more

    asyncio.run(spend(b"700"))
    trio.run(spend, b"100")
    run_virtual(leave_one_running)
    # None but virtual ones from here: after them a real clock is ahead by as long as the machine has been up.
    with pytest.raises(BudgetExceededError, match=r"\$875 is spent"):
        run_virtual(spend, b"130")
    run_virtual(spend, b"125")


@settings(max_examples=25)
@given(data=st.data(), backend=st.sampled_from(["asyncio", "trio"]))
def test_whatever_is_cancelled_it_is_as_if_calls_had_come_one_by_one(
    data: st.DataObject, backend: str
) -> None:
    calls = data.draw(
        st.lists(
            st.tuples(
                st.floats(0, 20),  # when it comes
                st.floats(0.1, 10),  # how long it takes
                st.integers(0, 400),  # its estimate
                st.floats(0, 1),  # how much of that it uses
                st.floats(0.05, 15),  # when its caller leaves
            ),
            max_size=15,
        )
    )
    one = budget()

    async def run() -> None:
        worth: list[int] = []

        async def call(begins: float, lasts: float, estimate: int, used: float, *, leaves: float) -> None:
            await anyio.sleep(begins)
            answer = Answer(tokens=int(estimate * used), duration=lasts)
            door = Door(one, provider=Answers(answer, marks_sent=True))
            remaining = await left(one)
            cost = estimate  # once it is sent and its caller has left, nobody knows what it used
            with anyio.move_on_after(leaves):
                try:
                    await door(body=str(estimate).encode())
                    cost = int(estimate * used)
                except BudgetExceededError:
                    assert estimate > remaining or (not estimate and remaining <= 0)
                    return
            assert estimate <= remaining
            worth.append(cost)

        async with anyio.create_task_group() as group:
            for begins, lasts, estimate, used, leaves in calls:
                group.start_soon(partial(call, begins, lasts, estimate, used, leaves=leaves))
        total, reserved, _ = await spent(one)
        assert reserved == 0
        assert total == sum(worth)
        assert total <= 1_000  # nobody used more than had been expected

    if backend == "asyncio":
        run_virtual(run)
    else:
        trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


# Options


@pytest.mark.parametrize(
    "wrong",
    [
        {"usd_per_day": -1},
        {"usd_per_day": "10"},
        {"usd_per_day": True},
        {"usd_per_day": {"a": 10}},
        {"usd_per_day": {"a": -1, "*": 10}},
        {"tokens_per_month": math.nan},
        {"key": "user"},
        {"price": 5},
        {"unpriced": "ignore"},
        {"calendar": "UTC"},
        {"calendar": lambda: datetime(2026, 1, 1)},  # noqa: DTZ001
        {"warn_ratio": 1.5},
        {"max_keys": 0},
        {"dry_run": 1},
        {"name": ""},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        budget(**wrong)


def test_without_a_cap_it_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="usd_per_day, usd_per_month, tokens_per_day, tokens_per_month"
    ):
        Budget()


def test_where_nobody_knows_what_a_call_costs_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ASGI door"):
        Pipeline([budget()], Answers(), door="asgi")
    with pytest.raises(ConfigurationError, match="estimate="):
        Pipeline([budget(estimate=TokenEstimate())])
    Pipeline([budget()])


async def test_around_a_function_that_says_what_it_used() -> None:
    one = budget(estimate=lambda _call: 100)

    def used(result: object) -> Outcome:
        assert isinstance(result, int)
        return Outcome(verdict=Verdict.SUCCESS, usage=Usage(input_tokens=result, output_tokens=0))

    pipeline = Pipeline([one], classify_result=used)

    async def work() -> int:
        return 70

    assert await pipeline.run(work) == 70
    assert await spent(one) == (70, 0, 0)


def test_a_rolling_day_is_cut_into_hours() -> None:
    periods = [period for _, period, _ in budget(usd_per_month=1)._allowances]
    assert periods == [RollingPeriod("day", 24 * HOUR, 24), RollingPeriod("month", 30 * 24 * HOUR, 30)]
