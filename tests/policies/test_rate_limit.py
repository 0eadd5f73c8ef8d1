"""Rate limits: what passes, what is refused and why, and what every option does."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from resilient_llm import (
    Backoff,
    Call,
    ConfigurationError,
    CostExceedsCapacityError,
    Deadline,
    Limit,
    Pipeline,
    RateLimit,
    RateLimitedError,
    Retry,
)
from tests.policies.rate_limiting import Answer, Answers, by_body, refusals, together
from tests.support import FAILURE, THROTTLED, Door

pytestmark = pytest.mark.anyio


async def test_a_bucket_s_worth_passes_at_once_and_the_rest_at_the_rate() -> None:
    provider = Answers()
    door = Door(RateLimit(requests_per_minute=60, window=3), provider=provider)
    await together([door] * 6)
    assert provider.times == [0, 0, 0, 1, 2, 3]


async def test_by_default_a_whole_minute_s_worth_passes_at_once() -> None:
    provider = Answers()
    await together([Door(RateLimit(requests_per_minute=30, max_wait=0), provider=provider)] * 31)
    assert len(provider.attempts) == 30


async def test_each_tenant_has_a_limit_of_its_own() -> None:
    provider = Answers()
    door = Door(RateLimit(requests_per_minute=60, window=1, max_wait=0), provider=provider)
    results = await together([partial(door, tenant=tenant) for tenant in "abab"])
    assert provider.tenants == "ab"
    assert len(refusals(results)) == 2


async def test_without_waiting_a_call_is_refused_at_once_and_told_when_to_come_back() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=6, window=10, max_wait=0)
    door = Door(limit, provider=provider)
    await door(tenant="a")
    await anyio.sleep(4)
    started = anyio.current_time()
    with pytest.raises(RateLimitedError) as refused:
        await door(tenant="a")
    assert anyio.current_time() == started
    error = refused.value
    assert error.retry_after == pytest.approx(6)
    assert error.limit == "requests of tenant"
    assert error.remaining == pytest.approx(0.4)
    assert (error.status, error.reason, error.name) == (429, "rate_limited", "rate_limit")
    assert str(error) == (
        "rate_limit: 0.4 of 1 requests of tenant remain, 1 are needed; "
        "that takes 6 s, more than max_wait=0 leaves it, and 0 calls wait"
    )
    assert error.retry_after is not None
    await anyio.sleep(error.retry_after)
    await door(tenant="a")
    assert len(provider.attempts) == 2


@pytest.mark.parametrize(
    ("options", "body", "limit"),
    [
        ({"requests_per_minute": 1}, b"0", "requests of tenant"),
        ({"requests_per_minute": 100, "tokens_per_minute": 1_000}, b"600", "tokens of tenant"),
        ({"requests_per_minute": 100, "burst": 1}, b"0", "burst of tenant"),
        ({"requests_per_minute": 1, "key": "model"}, b"0", "requests of model"),
        ({"requests_per_minute": 1, "key": "target"}, b"0", "requests of target"),
        ({"requests_per_minute": 1, "key": None}, b"0", "requests of account"),
        ({"requests_per_minute": 1, "key": ("tenant", "model")}, b"0", "requests of tenant+model"),
        ({"requests_per_minute": 1, "key": lambda call: call.priority}, b"0", "requests of custom"),
    ],
)
async def test_a_refusal_names_what_refused(options: dict[str, object], body: bytes, limit: str) -> None:
    door = Door(RateLimit(**options, max_wait=0, estimate=by_body), provider=Answers())  # type: ignore[arg-type]
    await door(body=body)
    with pytest.raises(RateLimitedError) as refused:
        await door(body=body)
    assert refused.value.limit == limit
    assert limit in str(refused.value)


async def test_all_scopes_and_dimensions_give_or_none() -> None:
    limit = RateLimit(
        limits=[
            Limit(key=None, requests_per_minute=100, tokens_per_minute=10_000),
            Limit(key="tenant", requests_per_minute=10, tokens_per_minute=1_000),
            Limit(key="model", requests_per_minute=50, tokens_per_minute=1_500, burst=20),
        ],
        max_wait=0,
        estimate=by_body,
    )
    provider = Answers()
    door = Door(limit, provider=provider)
    await door(tenant="a", body=b"900")
    with pytest.raises(RateLimitedError) as refused:
        await door(tenant="b", body=b"800")
    error = refused.value
    assert error.limit == "tokens of model"
    remaining = {level.name: level.remaining for level in error.levels}
    assert remaining == {
        "requests of tenant": 10,
        "tokens of tenant": 1_000,
        "requests of account": 99,
        "tokens of account": 9_100,
        "requests of model": 49,
        "tokens of model": 600,
        "burst of model": 19,
    }
    assert error.retry_after == pytest.approx(200 / 25)


async def test_burst_limits_the_second_and_the_others_the_minute() -> None:
    provider = Answers()
    door = Door(RateLimit(requests_per_minute=6, burst=2), provider=provider)
    await together([door] * 8)
    assert provider.times == [0, 0, 0.5, 1, 1.5, 2, 10, 20]


async def test_what_can_never_pass_is_refused_for_good_naming_both_numbers() -> None:
    door = Door(RateLimit(tokens_per_minute=100, estimate=by_body), provider=Answers())
    started = anyio.current_time()
    with pytest.raises(
        CostExceedsCapacityError, match=r"200 tokens of tenant .* the limit holds 100"
    ) as refused:
        await door(body=b"200")
    error = refused.value
    assert (error.cost, error.level.limit, error.retry_after, error.status) == (200, 100, None, 413)
    assert anyio.current_time() == started
    await door(body=b"100")


async def test_oversize_may_borrow_once_the_bucket_is_full() -> None:
    provider = Answers()
    door = Door(
        RateLimit(tokens_per_minute=60, estimate=by_body, oversize="borrow", max_wait=1_000),
        provider=provider,
    )
    await together([partial(door, body=body) for body in (b"30", b"120", b"1")])
    assert provider.times == [0, 30, 91]


@pytest.mark.parametrize("dry_run", [False, True])
async def test_what_no_bucket_can_lend_is_refused_and_locks_nobody_out(dry_run: bool) -> None:
    provider = Answers()
    limit = RateLimit(
        key="model",
        tokens_per_minute=60,
        estimate=by_body,
        oversize="borrow",
        max_wait=1e12,
        dry_run=dry_run,
    )
    door = Door(limit, provider=provider)
    if dry_run:
        await door(body=b"1000000000000")
    else:
        with pytest.raises(CostExceedsCapacityError, match="holds 60 and lends 60"):
            await door(body=b"1000000000000")
    assert limit.levels(door.calls[0])[0].remaining == 60


async def test_weights_of_a_tenant_are_checked_when_the_limit_is_made() -> None:
    for weights in ("gold", 5, {"a": "x"}, {"a": 0}, {"a": -1.0}, {"a": float("inf")}):
        with pytest.raises(ConfigurationError, match="weights"):
            RateLimit(requests_per_minute=1, weights=weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1.0, None, "many", float("nan"), RuntimeError()])
async def test_a_weight_that_fails_breaks_no_call(wrong: object, caplog: pytest.LogCaptureFixture) -> None:
    def weights(_tenant: str | None) -> float:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong  # type: ignore[return-value]

    provider = Answers()
    door = Door(RateLimit(requests_per_minute=60, window=1, weights=weights), provider=provider)
    await together([door] * 3)
    assert provider.times == [0, 1, 2]
    assert "weights=" in caplog.text


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"requests_per_minute": 5}, "requests_per_minute="),
        ({"window": 1}, "window="),
        ({"key": "model", "learn": True}, "key=, learn="),
    ],
)
def test_what_stands_for_a_single_limit_excludes_several(beside: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"limits= and {named} exclude each other"):
        RateLimit(limits=[Limit(key=None, requests_per_minute=60)], **beside)


_ONE = Limit(key=None, requests_per_minute=60)


@pytest.mark.parametrize("wrong", [_ONE, [5], [Limit], "ab", iter([_ONE]), False, None, 0])
def test_limits_are_a_list_of_them(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"limits(\[0\])?=.*: allowed are .*Limit objects"):
        RateLimit(requests_per_minute=1, limits=wrong)


async def test_cost_says_how_many_requests_a_call_counts_as() -> None:
    provider = Answers()
    door = Door(RateLimit(requests_per_minute=60, window=10, cost=by_body), provider=provider)
    await together([partial(door, body=body) for body in (b"8", b"4", b"0", b"3")])
    assert provider.times == [0, 2, 2, 5]


@pytest.mark.parametrize("wrong", [-5.0, float("nan"), float("inf"), "many", RuntimeError()])
async def test_a_cost_or_estimate_that_fails_breaks_no_call(
    wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(call: Call) -> float:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong  # type: ignore[return-value]

    limit = RateLimit(requests_per_minute=10, tokens_per_minute=1_000, cost=ask, estimate=ask)
    door = Door(limit, provider=Answers())
    await door(body=b'{"prompt": "1234", "max_tokens": 99}')
    assert [level.remaining for level in limit.levels(door.calls[0])] == [9, 900]
    assert "cost=" in caplog.text
    assert "estimate=" in caplog.text


async def test_the_wait_ends_with_the_deadline_and_one_that_cannot_fit_is_refused_at_once() -> None:
    provider = Answers()
    door = Door(Deadline(5), RateLimit(requests_per_minute=6, window=10, max_wait=100), provider=provider)
    await door()
    started = anyio.current_time()
    with pytest.raises(RateLimitedError) as refused:
        await door()
    assert anyio.current_time() == started
    assert refused.value.retry_after == pytest.approx(10)


async def test_those_further_back_are_refused_at_once_too() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, max_wait=4.5)
    started = anyio.current_time()
    results = await together([Door(limit, provider=provider)] * 10)
    assert provider.times == [0, 1, 2, 3, 4]
    assert [round(error.retry_after or 0, 6) for error in refusals(results)] == [5] * 5
    assert anyio.current_time() == started + 4


async def test_a_wait_as_long_as_max_wait_is_not_too_long() -> None:
    provider = Answers()
    await together([Door(RateLimit(requests_per_minute=6, window=10, max_wait=30), provider=provider)] * 4)
    assert provider.times == [0, 10, 20, 30]


async def test_a_full_queue_refuses_and_says_when_there_is_room() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=6, window=10, max_queued=1)
    results = await together([Door(limit, provider=provider)] * 3)
    (error,) = refusals(results)
    assert error.retry_after == pytest.approx(20)
    assert "1 calls wait" in str(error)


@pytest.mark.parametrize("bound", [{"max_queued": 0}, {"max_queued_total": 0}])
async def test_nobody_waits_where_there_is_no_queue(bound: dict[str, int]) -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, **bound)  # type: ignore[arg-type]
    (error,) = refusals(await together([Door(limit, provider=provider)] * 2))
    assert error.retry_after == pytest.approx(1)


async def test_the_queue_of_all_is_bounded_too() -> None:
    provider = Answers()
    limit = RateLimit(key=None, requests_per_minute=60, window=1, max_queued=1, max_queued_total=2)
    results = await together([partial(Door(limit, provider=provider), tenant=tenant) for tenant in "aabcd"])
    assert len(refusals(results)) == 2
    assert provider.tenants == "aab"


async def test_one_tenant_cannot_fill_the_queue() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, key=None, max_queued=3)
    door = Door(limit, provider=provider)
    results = await together([partial(door, tenant=tenant) for tenant in "aaaaaab"])
    assert len(refusals(results)) == 2
    assert provider.tenants == "aabaa"


async def test_below_retry_it_limits_attempts_and_above_it_calls() -> None:
    retry = Retry(backoff=Backoff(initial=0.1, jitter="none"))
    for policies, times in (
        ([retry, RateLimit(key="target", requests_per_minute=60, window=1)], [0, 1, 2]),
        ([RateLimit(requests_per_minute=60, window=1), retry], [0, 0.1, 0.3]),
    ):
        provider = Answers(Answer(outcome=FAILURE), Answer(outcome=FAILURE))
        door = Door(*policies, provider=provider)  # type: ignore[arg-type]
        await door()
        assert provider.times == times


async def test_a_refusal_below_retry_is_no_attempt() -> None:
    provider = Answers()
    door = Door(Retry(), RateLimit(key="target", requests_per_minute=1, max_wait=0), provider=provider)
    await door()
    with pytest.raises(RateLimitedError):
        await door()
    assert [call.attempts for call in door.calls] == [1, 0]


async def test_a_dry_run_counts_and_reports_and_stops_nobody() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, max_wait=2, dry_run=True)
    door = Door(limit, provider=provider)
    started = anyio.current_time()
    await together([door] * 5)
    assert anyio.current_time() == started
    assert len(provider.attempts) == 5
    # One passes, two would wait, and two be refused: those would have taken nothing.
    (level,) = limit.levels(door.calls[0])
    assert level.remaining == -2
    await Door(RateLimit(tokens_per_minute=10, estimate=by_body, dry_run=True), provider=provider)(
        body=b"100"
    )
    assert len(provider.attempts) == 6


async def test_levels_say_where_a_call_s_limits_stand_and_make_none() -> None:
    limit = RateLimit(requests_per_minute=60, tokens_per_minute=6_000, estimate=by_body)
    door = Door(limit, provider=Answers())
    await door(tenant="a", body=b"600")
    await anyio.sleep(2)
    requests, tokens = limit.levels(door.calls[0])
    assert (requests.name, requests.limit, requests.window) == ("requests of tenant", 60, 60)
    assert (requests.remaining, requests.reset) == (60, 0)
    assert tokens.remaining == pytest.approx(5_600)
    assert tokens.reset == pytest.approx(4)
    door.calls[0].tenant = "never seen"
    assert [level.remaining for level in limit.levels(door.calls[0])] == [60, 6_000]
    assert len(limit._quotas) == 1


async def test_the_gauge_reports_who_has_least_and_no_tenant() -> None:
    limit = RateLimit(requests_per_minute=60, window=10)
    door = Door(limit, provider=Answers())
    for tenant in "aab":
        await door(tenant=tenant)
    assert list(limit._observe()) == [
        (8, {"resilient_llm.limiter.name": "rate_limit:tenant", "resilient_llm.limit.unit": "requests"})
    ]
    levels = await anyio.to_thread.run_sync(lambda: list(limit._observe()))
    assert levels[0][0] == pytest.approx(8)


async def test_a_throttled_attempt_below_costs_no_call_of_the_limit_above() -> None:
    provider = Answers(Answer(outcome=THROTTLED), Answer(outcome=THROTTLED))
    limit = RateLimit(requests_per_minute=60, window=10)
    door = Door(limit, Retry(), provider=provider)
    await door()
    assert limit.levels(door.calls[0])[0].remaining == pytest.approx(10, abs=1)


def test_it_is_used_in_one_event_loop_after_the_other() -> None:
    limit = RateLimit(requests_per_minute=1, max_wait=0)

    async def main() -> None:
        await Door(limit, provider=Answers())()

    for _ in range(2):
        anyio.run(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "limits nothing"),
        ({"requests_per_minute": 0}, "requests_per_minute=0"),
        ({"tokens_per_minute": -1}, "tokens_per_minute=-1"),
        ({"burst": float("inf")}, "burst=inf"),
        ({"requests_per_minute": "many"}, "requests_per_minute='many'"),
        ({"requests_per_minute": True}, "requests_per_minute=True"),
        ({"requests_per_minute": 1, "window": 0}, "window=0"),
        ({"requests_per_minute": 1, "max_wait": -1}, "max_wait=-1"),
        ({"requests_per_minute": 1, "max_queued": -1}, "max_queued=-1"),
        ({"requests_per_minute": 1, "max_queued_total": -1}, "max_queued_total=-1"),
        ({"requests_per_minute": 1, "max_keys": 0}, "max_keys=0"),
        ({"requests_per_minute": 1, "key": "user"}, "key='user'"),
        ({"requests_per_minute": 1, "oversize": "debt"}, "oversize='debt'"),
        ({"requests_per_minute": 1, "weights": {"a": 0}}, "weights"),
        ({"requests_per_minute": 1, "ageing": -1}, "ageing=-1"),
        ({"requests_per_minute": 1, "limits": [Limit(key=None, burst=1)]}, "exclude each other"),
        ({"limits": [Limit(key=None, burst=1), Limit(key=None, burst=2)]}, "scope= of its own"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RateLimit(**options)  # type: ignore[arg-type]


def test_limits_of_one_key_may_have_names_of_their_own() -> None:
    RateLimit(limits=[Limit(key=None, burst=1), Limit(key=None, requests_per_minute=2, scope="provider")])


def test_its_description_says_what_was_asked_for() -> None:
    (described,) = Pipeline([RateLimit(requests_per_minute=60)]).describe().policies
    assert (described.name, described.level) == ("rate_limit", "call")
    assert described.options["requests_per_minute"] == 60
