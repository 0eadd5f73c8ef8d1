"""Circuits around attempts: when they open, how few probes they let through, and that none is lost."""

from __future__ import annotations

import anyio
import pytest

from resilient_llm import (
    AttemptError,
    Bulkhead,
    CircuitBreaker,
    CircuitOpenError,
    CircuitState,
    ConfigurationError,
    Retry,
)
from tests.support import BAD_REQUEST, FAILURE, THROTTLED, Door, Provider, cancel_at_every_await

pytestmark = pytest.mark.anyio

KEY = "api.example"


async def fail(door: Door, times: int) -> None:
    for _ in range(times):
        with pytest.raises(AttemptError):
            await door()


async def test_opens_after_consecutive_failures_and_refuses_without_an_attempt() -> None:
    provider = Provider(*[FAILURE] * 5)
    breaker = CircuitBreaker()
    door = Door(breaker, provider=provider)
    await fail(door, 5)
    with pytest.raises(CircuitOpenError, match="consecutive_failures, last error: 500") as refused:
        await door()
    assert refused.value.retry_after == pytest.approx(15)
    assert refused.value.status == 503
    assert len(provider.attempts) == 5
    assert breaker.state(KEY) is CircuitState.OPEN


async def test_a_successful_probe_closes_it() -> None:
    breaker = CircuitBreaker()
    door = Door(breaker, provider=Provider(*[FAILURE] * 5))
    await fail(door, 5)
    await anyio.sleep(15)
    await door()
    assert breaker.state(KEY) is CircuitState.CLOSED


async def test_a_failed_probe_opens_it_for_longer() -> None:
    breaker = CircuitBreaker()
    door = Door(breaker, provider=Provider(*[FAILURE] * 6))
    await fail(door, 5)
    await anyio.sleep(15)
    await fail(door, 1)
    with pytest.raises(CircuitOpenError) as refused:
        await door()
    assert refused.value.retry_after == pytest.approx(22.5)


@pytest.mark.parametrize("probes", [1, 3])
async def test_cb_06_never_more_probes_than_allowed_under_a_thousand_callers(probes: int) -> None:
    provider = Provider(*[FAILURE] * 5)
    breaker = CircuitBreaker(half_open_max_calls=probes, success_threshold=probes)
    door = Door(breaker, provider=provider)
    await fail(door, 5)
    await anyio.sleep(15)
    provider.peak = 0
    provider.duration = 1.0
    refused = 0

    async def one() -> None:
        nonlocal refused
        try:
            await door()
        except CircuitOpenError:
            refused += 1

    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(one)
    assert provider.peak == probes
    assert refused == 1000 - probes
    assert breaker.state(KEY) is CircuitState.CLOSED


async def test_a_stale_success_does_not_close_it() -> None:
    provider = Provider(60.0, *[FAILURE] * 5)
    breaker = CircuitBreaker()
    door = Door(breaker, provider=provider)
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await anyio.sleep(55)
        await fail(door, 5)
        await anyio.sleep(6)  # the old call has succeeded meanwhile
        assert breaker.state(KEY) is CircuitState.OPEN
        with pytest.raises(CircuitOpenError):
            await door()


async def test_cb_03_a_cancelled_probe_does_not_jam_it() -> None:
    breaker = CircuitBreaker()
    provider = Provider(*[FAILURE] * 5, 30.0)
    door = Door(breaker, provider=provider)
    await fail(door, 5)
    await anyio.sleep(15)
    with anyio.move_on_after(1):
        await door()
    await door()
    assert breaker.state(KEY) is CircuitState.CLOSED


async def test_cb_03_a_hung_probe_does_not_jam_it() -> None:
    breaker = CircuitBreaker(probe_timeout=20)
    provider = Provider(*[FAILURE] * 5, 10_000.0)
    door = Door(breaker, provider=provider)
    await fail(door, 5)
    await anyio.sleep(15)
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await anyio.sleep(21)  # the probe is presumed lost: a failure, and a longer break
        with pytest.raises(CircuitOpenError):
            await door()
        await anyio.sleep(22)
        await door()
        assert breaker.state(KEY) is CircuitState.CLOSED
        group.cancel_scope.cancel()


async def test_nothing_is_held_whenever_a_probe_is_cancelled() -> None:
    doors: list[tuple[Door, CircuitBreaker]] = []

    async def scenario() -> None:
        breaker = CircuitBreaker(consecutive_failures=1)
        door = Door(breaker, provider=Provider(FAILURE, [0.5, 0.5], duration=0.1))
        doors.append((door, breaker))
        await fail(door, 1)
        await anyio.sleep(15)
        await door()

    async def check() -> None:
        door, breaker = doors[-1]
        await anyio.sleep(60)
        await door()  # at once: no probe is out
        assert breaker.state(KEY) is CircuitState.CLOSED

    # The first attempt may be cancelled before it fails; then there is nothing to close.
    assert await cancel_at_every_await(scenario, check) >= 3


async def test_cb_01_the_requests_own_faults_do_not_count() -> None:
    breaker = CircuitBreaker()
    door = Door(breaker, provider=Provider(*[BAD_REQUEST] * 10))
    await fail(door, 10)
    await door()


async def test_cb_08_throttling_does_not_count() -> None:
    breaker = CircuitBreaker()
    door = Door(breaker, provider=Provider(*[THROTTLED] * 10))
    await fail(door, 10)
    assert breaker.state(KEY) is CircuitState.CLOSED


async def test_a_throttled_probe_neither_opens_nor_closes_it() -> None:
    breaker = CircuitBreaker()
    door = Door(breaker, provider=Provider(*[FAILURE] * 5, THROTTLED))
    await fail(door, 5)
    await anyio.sleep(15)
    await fail(door, 1)
    assert breaker.state(KEY) is CircuitState.HALF_OPEN
    await door()
    assert breaker.state(KEY) is CircuitState.CLOSED


async def test_cb_07_failures_do_not_add_up_over_a_lifetime() -> None:
    breaker = CircuitBreaker()
    provider = Provider()
    door = Door(breaker, provider=provider)
    for number in range(200):
        if number % 20 == 0:
            provider.script.append(FAILURE)
            await fail(door, 1)
        else:
            await door()
        await anyio.sleep(18)
    assert breaker.state(KEY) is CircuitState.CLOSED


async def test_slow_first_tokens_open_it() -> None:
    breaker = CircuitBreaker(slow_call_ratio=0.5, slow_call_duration=10.0)
    door = Door(breaker, provider=Provider(duration=12.0))
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(door)
    assert breaker.state(KEY) is CircuitState.OPEN


async def test_each_target_has_a_circuit_of_its_own() -> None:
    door = Door(CircuitBreaker(), provider=Provider(*[FAILURE] * 5))
    await fail(door, 5)
    await door(target="other.example")


async def test_models_can_have_circuits_of_their_own() -> None:
    breaker = CircuitBreaker(key=("target", "model"))
    door = Door(breaker, provider=Provider(*[FAILURE] * 5))
    await fail(door, 5)
    await door(model="other")
    assert breaker.state((KEY, "gpt-4o")) is CircuitState.OPEN


async def test_isolate_and_close_by_hand() -> None:
    breaker = CircuitBreaker()
    door = Door(breaker, provider=Provider())
    breaker.isolate(KEY)
    with pytest.raises(CircuitOpenError, match="isolated by hand") as refused:
        await door()
    assert refused.value.retry_after is None
    await anyio.sleep(3600)
    with pytest.raises(CircuitOpenError):
        await door()
    breaker.close(KEY)
    await door()


async def test_dry_run_counts_but_refuses_nothing() -> None:
    breaker = CircuitBreaker(dry_run=True)
    provider = Provider(*[FAILURE] * 10)
    door = Door(breaker, provider=provider)
    await fail(door, 10)
    assert breaker.state(KEY) is CircuitState.OPEN
    assert len(provider.attempts) == 10


async def test_a_circuit_outside_a_retry_is_a_build_error_that_says_why() -> None:
    with pytest.raises(ConfigurationError, match=r"retry must stand before circuit.*each retry must pass"):
        Door(CircuitBreaker(), Retry(), provider=Provider())


async def test_a_circuit_before_a_queue_is_a_build_error_that_says_why() -> None:
    with pytest.raises(ConfigurationError, match="no half-open probe may wait in a queue"):
        Door(Retry(), CircuitBreaker(), Bulkhead(max_concurrent=1, key="target"), provider=Provider())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failure_ratio": 1.5}, "failure_ratio=1.5"),
        ({"minimum_throughput": 0}, "minimum_throughput=0"),
        ({"break_duration": 0}, "break_duration=0"),
        ({"break_duration": 50, "max_break_duration": 40}, "max_break_duration=40"),
        ({"key": "user"}, "key='user'"),
    ],
)
async def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CircuitBreaker(**options)  # type: ignore[arg-type]
