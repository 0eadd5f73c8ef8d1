"""The adaptive limit around attempts: what is a sample, who waits, and that no slot is ever lost."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from resilient_llm import (
    AttemptError,
    Call,
    CircuitBreaker,
    CircuitOpenError,
    ConcurrencyLimit,
    ConcurrencyLimitError,
    ConfigurationError,
    Deadline,
    DeadlineExceededError,
    Outcome,
    Pipeline,
    Reply,
    Retry,
    Scope,
    Telemetry,
    Verdict,
)
from resilient_llm.core.aimd import LimitAlgorithm, Sent
from resilient_llm.outcome import CANCELLED, DEADLINE_EXCEEDED, SUCCESS
from tests.signals import Recording
from tests.support import BAD_REQUEST, FAILURE, THROTTLED, Door, Nothing, Provider, cancel_at_every_await

pytestmark = pytest.mark.anyio

KEY = "api.example"


class Recorder:
    """An algorithm that keeps its samples and gives the limits it was told to, the last one for good."""

    generation = 0

    def __init__(self, *limits: int) -> None:
        self.limits = list(limits)
        self.samples: list[tuple[float, float, int, bool]] = []

    @property
    def limit(self) -> int:
        return self.limits[0]

    def on_sample(self, now: float, sent: Sent, *, dropped: bool) -> int:
        self.samples.append((now, sent.at, sent.in_flight, dropped))
        if len(self.limits) > 1:
            self.limits.pop(0)
        return self.limit


async def run_all(door: Door, count: int, **options: Any) -> list[Reply | BaseException]:
    results: list[Reply | BaseException] = []

    async def one() -> None:
        try:
            results.append(await door(**options))
        except Exception as error:  # noqa: BLE001 - it is a result
            results.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(one)
    return results


async def test_no_more_than_the_limit_at_once() -> None:
    provider = Provider(duration=1.0)
    limit = ConcurrencyLimit(initial=3, max=3)
    started = anyio.current_time()
    await run_all(Door(limit, provider=provider), 9)
    assert provider.peak == 3
    assert anyio.current_time() - started == pytest.approx(3)
    assert (limit.in_use(), limit.queued()) == (0, 0)


async def test_it_grows_while_it_is_in_use_and_new_slots_wake_who_waits() -> None:
    provider = Provider(duration=1.0)
    limit = ConcurrencyLimit(initial=2, max_queued=1000)
    await run_all(Door(limit, provider=provider), 100)
    assert limit.limit(KEY) > 10
    assert provider.peak > 10
    assert limit.in_use() == 0


async def test_it_does_not_grow_while_it_is_not_in_use() -> None:
    limit = ConcurrencyLimit(initial=10)
    door = Door(limit, provider=Provider(duration=1.0))
    for _ in range(50):
        await run_all(door, 4)
    assert limit.limit(KEY) == 10


OVERLOADED = Outcome(verdict=Verdict.FAILURE, scope=Scope.UPSTREAM, error_type="overloaded_error")


@pytest.mark.parametrize(
    ("outcome", "after"),
    [
        (THROTTLED, 7),
        (OVERLOADED, 7),
        (Outcome(verdict=Verdict.FAILURE, status=503), 7),
        (Outcome(verdict=Verdict.FAILURE, status=504), 7),
        (Outcome(verdict=Verdict.FAILURE, status=529), 7),
        (Outcome(verdict=Verdict.FAILURE, error_type="read_timeout"), 7),
        (Outcome(verdict=Verdict.FAILURE, error_type="timeout"), 7),
        (FAILURE, 10),
        (BAD_REQUEST, 10),
        (Outcome(verdict=Verdict.FAILURE, error_type="connect_error"), 10),
        (
            Outcome(
                verdict=Verdict.FATAL, scope=Scope.CREDENTIAL, status=429, error_type="insufficient_quota"
            ),
            10,
        ),
        (CANCELLED, 10),
        (DEADLINE_EXCEEDED, 10),
        (Outcome(verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type="pool_timeout"), 10),
    ],
    ids=str,
)
async def test_what_makes_it_shrink(outcome: Outcome, after: int) -> None:
    limit = ConcurrencyLimit(initial=10)
    door = Door(limit, provider=Provider(outcome, duration=1.0))
    with pytest.raises(AttemptError):
        await door()
    assert limit.limit(KEY) == after


async def test_a_burst_of_refusals_is_one() -> None:
    limit = ConcurrencyLimit(initial=10)
    door = Door(limit, provider=Provider(*[THROTTLED] * 10, duration=1.0))
    assert all(isinstance(result, AttemptError) for result in await run_all(door, 10))
    assert limit.limit(KEY) == 7


async def test_refusals_that_take_no_time_do_not_eat_up_the_queue() -> None:
    """As in a simulation, where many things happen in one instant: order counts, not the clock."""
    running, refused = 0, 0

    async def upstream(attempt: Call) -> Reply:
        nonlocal running, refused
        if running >= 12:
            refused += 1
            raise AttemptError(THROTTLED)
        running += 1
        try:
            return await Provider(duration=1.0)(attempt)
        finally:
            running -= 1

    limit = ConcurrencyLimit(max_queued=1000, max_wait=600)
    results = await run_all(Door(limit, provider=upstream), 500)
    assert refused < 25  # eight of the first twenty at once
    assert sum(isinstance(result, Reply) for result in results) == 500 - refused


async def test_a_caller_that_leaves_is_no_sample() -> None:
    algorithm = Recorder(2)
    door = Door(ConcurrencyLimit(algorithm=lambda: algorithm), provider=Provider(duration=5.0))
    with anyio.move_on_after(1):
        await door()
    assert algorithm.samples == []


async def test_a_refusal_below_is_no_sample() -> None:
    algorithm = Recorder(2)
    limit = ConcurrencyLimit(algorithm=lambda: algorithm)
    breaker = CircuitBreaker()
    door = Door(limit, breaker, provider=Provider())
    breaker.isolate(KEY)
    with pytest.raises(CircuitOpenError):
        await door()
    assert algorithm.samples == []
    assert limit.in_use() == 0


async def test_the_wait_for_a_slot_is_not_the_target_s_time() -> None:
    algorithm = Recorder(1)
    door = Door(ConcurrencyLimit(algorithm=lambda: algorithm), provider=Provider(duration=1.0))
    started = anyio.current_time()
    await run_all(door, 3)
    assert [sent_at - started for _, sent_at, *_ in algorithm.samples] == pytest.approx([0, 1, 2])
    assert [now - started for now, *_ in algorithm.samples] == pytest.approx([1, 2, 3])
    assert [in_flight for *_, in_flight, _ in algorithm.samples] == [1, 1, 1]


async def test_each_attempt_is_a_sample_of_its_own() -> None:
    algorithm = Recorder(5)
    limit = ConcurrencyLimit(algorithm=lambda: algorithm)
    door = Door(Retry(random=random.Random(1)), limit, provider=Provider(THROTTLED, duration=1.0))
    await door()
    assert [dropped for *_, dropped in algorithm.samples] == [True, False]
    assert all(now - sent_at == pytest.approx(1) for now, sent_at, *_ in algorithm.samples)


async def test_a_slot_is_held_until_the_reply_has_been_read() -> None:
    attempts: list[Call] = []

    async def stream(attempt: Call) -> Reply:
        attempts.append(attempt)
        return Reply(200, [], Nothing())

    algorithm = Recorder(1, 3)
    limit = ConcurrencyLimit(algorithm=lambda: algorithm)
    door = Door(limit, provider=stream)
    await door()
    await anyio.sleep(5)
    assert limit.in_use() == 1
    assert algorithm.samples == []
    attempts[0].finish(SUCCESS)
    assert limit.in_use() == 0
    [(now, sent_at, _, _)] = algorithm.samples
    assert now - sent_at == pytest.approx(5)


async def test_a_smaller_limit_drains_before_anybody_is_let_in() -> None:
    algorithm = Recorder(4, 4, 1)
    provider = Provider(1.0, 2.0, 3.0, 4.0)
    limit = ConcurrencyLimit(algorithm=lambda: algorithm)
    async with anyio.create_task_group() as group:
        door = Door(limit, provider=provider)
        for _ in range(4):
            group.start_soon(door)
        await wait_all_tasks_blocked()
        group.start_soon(door)
        await anyio.sleep(1.5)  # the first is done and the fifth in its place
        group.start_soon(door)
        await anyio.sleep(1.0)
        assert (provider.running, limit.queued()) == (2, 1)
        await anyio.sleep(1.0)
        assert (provider.running, limit.queued()) == (1, 1)
    assert (limit.in_use(), limit.queued()) == (0, 0)
    assert len(provider.attempts) == 6


async def test_a_full_queue_refuses_at_once() -> None:
    door = Door(ConcurrencyLimit(initial=1, max=1, max_queued=1), provider=Provider(duration=4.0))
    await door()
    results = await run_all(door, 3)
    [refused] = [result for result in results if isinstance(result, ConcurrencyLimitError)]
    assert str(refused) == "concurrency_limit is full (1 calls running) and its queue is full"
    assert refused.status == 503
    assert refused.reason == "concurrency_limit"
    assert refused.retry_after == pytest.approx(8)


async def test_max_wait_and_the_deadline_bound_the_wait() -> None:
    limit = ConcurrencyLimit(initial=1, max=1, max_wait=2)
    door = Door(Deadline(60), limit, provider=Provider(duration=10.0))
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await wait_all_tasks_blocked()
        with pytest.raises(ConcurrencyLimitError, match="waited 2 s"):
            await door()
        with pytest.raises(DeadlineExceededError):
            await door(deadline=anyio.current_time() + 1)
        assert limit.queued() == 0


async def test_tenants_wait_in_turn() -> None:
    provider = Provider(duration=1.0)
    door = Door(ConcurrencyLimit(initial=1, max=1), provider=provider)
    async with anyio.create_task_group() as group:
        for tenant in "aaaab":
            group.start_soon(lambda tenant=tenant: door(tenant=tenant))  # type: ignore[misc]
            await wait_all_tasks_blocked()
    assert "".join(str(attempt.tenant) for _, attempt in provider.attempts) == "aabaa"


async def test_each_target_has_a_limit_of_its_own() -> None:
    limit = ConcurrencyLimit(initial=10)
    door = Door(limit, provider=Provider(THROTTLED))
    with pytest.raises(AttemptError):
        await door(target="one.example")
    await door(target="two.example")
    assert (limit.limit("one.example"), limit.limit("two.example")) == (7, 10)


async def test_keys_are_bounded_and_idle_ones_forgotten() -> None:
    limit = ConcurrencyLimit(key="model", max_keys=10)
    door = Door(limit, provider=Provider())
    for index in range(1000):
        await door(model=f"model-{index}")
    assert len(limit._limits) <= 10


async def test_keys_in_use_beyond_the_bound_share_one_limit() -> None:
    provider = Provider(duration=1.0)
    limit = ConcurrencyLimit(initial=1, max=1, key="tenant", max_keys=2)
    door = Door(limit, provider=provider)
    started = anyio.current_time()
    async with anyio.create_task_group() as group:
        for tenant in "abcd":
            group.start_soon(lambda tenant=tenant: door(tenant=tenant))  # type: ignore[misc]
            await wait_all_tasks_blocked()
    assert anyio.current_time() - started == pytest.approx(2)  # c and d one after the other
    assert limit.in_use() == 0


async def test_nothing_is_held_whenever_a_call_is_cancelled() -> None:
    limit = ConcurrencyLimit(initial=1, max=1)
    provider = Provider(duration=1.0)
    door = Door(limit, provider=provider)

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(door)
            await anyio.sleep(0.1)
            await door()

    async def check() -> None:
        assert (limit.in_use(), limit.queued(), provider.running) == (0, 0, 0)
        assert limit.limit(KEY) == 1
        await door()  # and it still works

    assert await cancel_at_every_await(scenario, check) >= 3


@pytest.mark.parametrize("seed", range(5))
async def test_slots_are_conserved_while_the_limit_moves(seed: int) -> None:
    rng = random.Random(seed)
    script = [rng.choice([SUCCESS, SUCCESS, THROTTLED, FAILURE]) for _ in range(300)]
    provider = Provider(*script, duration=0.5)
    limit = ConcurrencyLimit(initial=5, max_queued=20, max_wait=3)
    door = Door(limit, provider=provider)

    async def one(patience: float) -> None:
        with anyio.move_on_after(patience), contextlib.suppress(ConcurrencyLimitError, AttemptError):
            await door(tenant=rng.choice("ab"))

    async with anyio.create_task_group() as group:
        for _ in range(300):
            group.start_soon(one, rng.uniform(0, 4))
            await anyio.sleep(rng.uniform(0, 0.1))
    assert (limit.in_use(), limit.queued(), provider.running) == (0, 0, 0)


async def test_another_algorithm_can_be_put_in() -> None:
    made: list[LimitAlgorithm] = []

    def algorithm() -> LimitAlgorithm:
        made.append(Recorder(2))
        return made[-1]

    limit = ConcurrencyLimit(algorithm=algorithm)
    provider = Provider(duration=1.0)
    await run_all(Door(limit, provider=provider), 4, target="one.example")
    await run_all(Door(limit, provider=provider), 4, target="two.example")
    assert provider.peak == 2
    assert len(made) == 3  # one for each target, and one to see that it can be made
    assert len(limit._limits) == 2


async def test_a_dry_run_neither_waits_nor_refuses_but_says_so() -> None:
    recording = Recording()
    telemetry = Telemetry(tracer_provider=recording.tracer_provider, meter_provider=recording.meter_provider)
    limit = ConcurrencyLimit(initial=2, max=2, max_queued=1, dry_run=True)
    pipeline = Pipeline([limit], telemetry=telemetry)
    started = anyio.current_time()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(pipeline.run, anyio.sleep, 1.0)
    assert anyio.current_time() - started == pytest.approx(1)
    events = sorted(event for span in recording.spans for event in span.event_names())
    assert events == ["resilient_llm.rejected"] * 2 + ["resilient_llm.would_wait"]
    rejections = recording.points.one("resilient_llm.rejections", reason="concurrency_limit")
    assert (rejections.value, rejections.attributes["resilient_llm.dry_run"]) == (2, True)
    assert limit.in_use() == 0


async def test_a_dry_run_adapts_all_the_same() -> None:
    limit = ConcurrencyLimit(initial=10, dry_run=True)
    provider = Provider(*[THROTTLED] * 30, duration=1.0)
    door = Door(limit, provider=provider)
    await run_all(door, 30)
    assert limit.limit(KEY) == 7
    await run_all(door, 100)
    assert limit.limit(KEY) > 7
    assert provider.peak == 100


async def test_gauges_show_the_limits_and_who_is_in() -> None:
    recording = Recording()
    telemetry = Telemetry(tracer_provider=recording.tracer_provider, meter_provider=recording.meter_provider)
    limit = ConcurrencyLimit(initial=2, max=2)
    pipeline = Pipeline([limit], telemetry=telemetry)

    async def nap() -> None:
        await anyio.sleep(1.0)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(pipeline.run, nap)
        await anyio.sleep(0.5)
        points = recording.points
    assert points.one("resilient_llm.concurrency.limit", limiter_name="concurrency_limit:nap").value == 2
    assert points.one("resilient_llm.concurrency.active", limiter_name="concurrency_limit").value == 2
    assert points.one("resilient_llm.concurrency.queued", limiter_name="concurrency_limit").value == 3


async def test_gauges_do_not_name_tenants() -> None:
    limit = ConcurrencyLimit(key=("tenant", "model"))
    await Door(limit, provider=Provider())(tenant="secret")
    assert [dict(labels) for _, labels in limit._observe_limit()] == [
        {"resilient_llm.limiter.name": "concurrency_limit"}
    ]


async def test_gauges_have_a_word_for_keys_without_a_limit_of_their_own() -> None:
    limit = ConcurrencyLimit(key="model", max_keys=1)
    provider = Provider(duration=1.0)

    async def ask(model: str) -> None:
        await Door(limit, provider=provider)(model=model)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "m")
        await wait_all_tasks_blocked()
        group.start_soon(ask, "another")
        await wait_all_tasks_blocked()
        assert [labels["resilient_llm.limiter.name"] for _, labels in limit._observe_limit()] == [
            "concurrency_limit:m",
            "concurrency_limit:other",
        ]


async def test_it_finds_what_an_upstream_takes_and_follows_it() -> None:
    """Enough callers for any limit, and an upstream that refuses what is too much."""
    takes, running, refused, answered = 12, 0, 0, 0
    rng = random.Random(1)

    class Busy(Exception):  # noqa: N818 - as a provider would say
        status_code = 429

    async def upstream() -> None:
        nonlocal running, refused, answered
        if running >= takes:
            refused += 1
            await anyio.sleep(0.05)
            raise Busy
        running += 1
        try:
            await anyio.sleep(rng.lognormvariate(0, 0.3))
            answered += 1
        finally:
            running -= 1

    limit = ConcurrencyLimit(max_queued=100, max_wait=1000)
    pipeline = Pipeline([limit])

    async def caller() -> None:
        while True:
            with contextlib.suppress(Busy):
                await pipeline.run(upstream)

    async def measure(seconds: float) -> tuple[float, float]:
        nonlocal refused, answered
        refused = answered = 0
        await anyio.sleep(seconds)
        return answered / seconds, refused / (answered + refused)

    async with anyio.create_task_group() as group:
        for _ in range(60):
            group.start_soon(caller)
        for takes in (12, 6, 24):
            await anyio.sleep(40)
            throughput, ratio = await measure(60)
            assert throughput > 0.75 * takes
            assert ratio < 0.03
        group.cancel_scope.cancel()


async def test_it_stands_inside_the_retry_and_not_at_the_asgi_door() -> None:
    with pytest.raises(ConfigurationError, match="retry must stand before concurrency_limit"):
        Pipeline([ConcurrencyLimit(), Retry()])
    with pytest.raises(ConfigurationError, match="no meaning at the ASGI door"):
        Pipeline([ConcurrencyLimit()], door="asgi")
    with pytest.raises(ConfigurationError, match="no half-open probe may wait"):
        Pipeline([CircuitBreaker(), ConcurrencyLimit()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0}, "initial=0"),
        ({"initial": 1.5}, "initial=1.5"),
        ({"min": 0}, "min=0"),
        ({"max": 10}, "initial=20: allowed are counts from min=1 to max=10"),
        ({"min": 30, "max": 20}, "max=20"),
        ({"decrease_ratio": 1}, "decrease_ratio=1"),
        ({"min_gain_ratio": 1}, "min_gain_ratio=1: allowed are numbers from 0 to below 1, and None"),
        ({"min_gain_ratio": -0.1}, "min_gain_ratio=-0.1: allowed are numbers from 0 to below 1, and None"),
        ({"max_queued": -1}, "max_queued=-1"),
        ({"max_wait": -1}, "max_wait=-1"),
        ({"key": "user"}, "key='user'"),
        ({"max_keys": 0}, "max_keys=0"),
    ],
)
async def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ConcurrencyLimit(**options)


@pytest.mark.parametrize("dry_run", [False, True])
async def test_an_algorithm_that_fails_keeps_no_slot(dry_run: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recorder):
        def on_sample(self, now: float, sent: Sent, *, dropped: bool) -> int:
            super().on_sample(now, sent, dropped=dropped)
            answer: int = answers[len(self.samples) - 1]()
            return answer

    answers: list[Any] = [lambda: 1 / 0, lambda: math.nan, lambda: -1, lambda: None, lambda: 1]
    algorithm = Failing(1)
    limit = ConcurrencyLimit(algorithm=lambda: algorithm, max_queued=0, dry_run=dry_run)
    door = Door(limit, provider=Provider())
    for _ in answers:
        await door()
        assert limit.in_use() == 0
    assert len(algorithm.samples) == len(answers)
    assert all("algorithm=" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2  # one for each kind of failure


@pytest.mark.parametrize("answer", [0, -1, 2.7, None])
async def test_an_algorithm_that_gives_no_limit_leaves_it_as_it_was(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limit = ConcurrencyLimit(algorithm=lambda: Recorder(2, answer), max_wait=5.0)
    provider = Provider(duration=1.0)
    for target in ("one.example", "two.example"):
        results = await run_all(Door(limit, provider=provider), 6, target=target)
        assert all(isinstance(result, Reply) for result in results)
        assert limit.limit(target) == limit.limits()[target] == 2
    assert provider.peak == 2
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert f"gave {answer!r}: allowed are integers from 1; the limit stays as it is" in record.getMessage()


@pytest.mark.parametrize("answer", [0, -1, 2.7, None])
async def test_an_algorithm_that_begins_with_no_limit_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"limit is {answer}: allowed are integers from 1"):
        ConcurrencyLimit(algorithm=lambda: Recorder(answer))


def test_a_limit_is_a_targets_by_its_place_in_the_key() -> None:
    limit = ConcurrencyLimit(key=("model", "target"))
    assert limit.keys_of("gpt-4o") == []
