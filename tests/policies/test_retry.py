"""The attempt loop in virtual time: when attempts are made, when not, and what is left behind."""

from __future__ import annotations

import dataclasses
import random
from contextlib import suppress

import anyio
import pytest

from resilient_llm import (
    AttemptError,
    Backoff,
    Call,
    CircuitBreaker,
    CircuitOpenError,
    ConfigurationError,
    Deadline,
    DeadlineExceededError,
    Reply,
    Retry,
)
from resilient_llm.outcome import SUCCESS, Outcome, Verdict
from tests.policies.hedging import Gate, knows_what_is_sent
from tests.support import (
    BAD_REQUEST,
    FAILURE,
    THROTTLED,
    Door,
    Nothing,
    Provider,
    Step,
    cancel_at_every_await,
)

pytestmark = pytest.mark.anyio

FIXED = Backoff(initial=1.0, multiplier=2.0, maximum=8.0, jitter="none")


def throttled(retry_after: float) -> Outcome:
    return Outcome(
        verdict=Verdict.THROTTLED,
        error_type="429",
        status=429,
        retryable=True,
        retry_after=retry_after,
        retry_after_source="retry-after",
    )


async def test_first_success_needs_one_attempt() -> None:
    provider = Provider()
    door = Door(Retry(), provider=provider)
    await door()
    assert len(provider.attempts) == 1
    assert door.calls[0].retries == 0
    assert door.calls[0].outcome is not None
    assert door.calls[0].outcome.ok


async def test_backs_off_exponentially_between_attempts() -> None:
    provider = Provider(FAILURE, FAILURE, FAILURE)
    await Door(Retry(max_attempts=4, backoff=FIXED), provider=provider)()
    assert provider.times == [0.0, 1.0, 3.0, 7.0]


async def test_full_jitter_stays_below_the_cap() -> None:
    provider = Provider(*[FAILURE] * 9)
    retry = Retry(max_attempts=10, budget_min_per_second=10, random=random.Random(7))
    await Door(retry, provider=provider)()
    gaps = [later - earlier for earlier, later in zip(provider.times, provider.times[1:], strict=False)]
    ceilings = [min(8.0, 0.5 * 2**n) for n in range(9)]
    assert all(0 <= gap <= ceiling for gap, ceiling in zip(gaps, ceilings, strict=True))
    assert len(set(gaps)) == len(gaps)


async def test_attempts_are_numbered_and_counted() -> None:
    provider = Provider(FAILURE, FAILURE)
    door = Door(Retry(backoff=FIXED), provider=provider)
    await door()
    assert [(attempt.number, attempt.reason) for _, attempt in provider.attempts] == [
        (1, "initial"),
        (2, "retry"),
        (3, "retry"),
    ]
    assert (door.calls[0].attempts, door.calls[0].retries, door.calls[0].retry_delay) == (3, 2, 3.0)


async def test_raises_the_last_failure_when_attempts_are_used_up() -> None:
    last = Outcome(verdict=Verdict.FAILURE, error_type="503", status=503, retryable=True)
    door = Door(Retry(max_attempts=2, backoff=FIXED), provider=Provider(FAILURE, last))
    with pytest.raises(AttemptError) as raised:
        await door()
    assert raised.value.outcome is last
    assert door.calls[0].exhausted


@pytest.mark.parametrize(
    "outcome", [BAD_REQUEST, Outcome(verdict=Verdict.FATAL, error_type="401", status=401)]
)
async def test_what_waiting_cannot_mend_is_not_retried(outcome: Outcome) -> None:
    provider = Provider(outcome)
    door = Door(Retry(), provider=provider)
    with pytest.raises(AttemptError):
        await door()
    assert len(provider.attempts) == 1
    assert not door.calls[0].exhausted


async def test_a_hint_is_a_floor_with_upward_jitter() -> None:
    provider = Provider(throttled(20.0))
    await Door(Retry(backoff=FIXED, random=random.Random(1)), provider=provider)()
    assert 20.0 <= provider.times[1] <= 22.0


async def test_a_hint_below_the_backoff_does_not_shorten_it() -> None:
    provider = Provider(throttled(0.01))
    await Door(Retry(backoff=FIXED), provider=provider)()
    assert provider.times == [0.0, 1.0]


async def test_ra_01_retry_after_zero_means_own_backoff_and_bounded_attempts() -> None:
    provider = Provider(*[throttled(0.0)] * 5)
    with pytest.raises(AttemptError):
        await Door(Retry(max_attempts=3, backoff=FIXED), provider=provider)()
    assert provider.times == [0.0, 1.0, 3.0]


@pytest.mark.parametrize(("hint", "attempts"), [(120.0, 2), (121.0, 1), (1800.0, 1), (float("inf"), 1)])
async def test_ra_03_a_hint_over_the_cap_ends_the_call_at_once(hint: float, attempts: int) -> None:
    provider = Provider(throttled(hint))
    started = anyio.current_time()
    if attempts == 1:
        with pytest.raises(AttemptError) as raised:
            await Door(Retry(max_retry_after=120.0), provider=provider)()
        assert raised.value.outcome.retry_after == hint
        assert anyio.current_time() == started
    else:
        await Door(Retry(max_retry_after=120.0), provider=provider)()
    assert len(provider.attempts) == attempts


async def test_ra_03_a_hint_that_does_not_fit_the_deadline_ends_the_call_at_once() -> None:
    provider = Provider(throttled(60.0))
    started = anyio.current_time()
    with pytest.raises(AttemptError):
        await Door(Deadline(15), Retry(), provider=provider)()
    assert anyio.current_time() == started


@pytest.mark.parametrize(("reset", "second"), [(20.0, 20.0), (360.0, 1.0)])
async def test_ra_12_a_reset_is_an_upper_bound_and_only_used_within_the_cap(
    reset: float, second: float
) -> None:
    full_again = dataclasses.replace(throttled(reset), retry_after_source="ratelimit-reset")
    provider = Provider(full_again)
    await Door(Retry(backoff=FIXED), provider=provider)()
    assert second <= provider.times[1] <= second * 1.1


async def test_can_11_one_deadline_covers_all_attempts() -> None:
    script: list[list[Step]] = [[20.0, FAILURE]] * 5
    provider = Provider(*script)
    started = anyio.current_time()
    door = Door(Deadline(30), Retry(max_attempts=5, backoff=FIXED), provider=provider)
    with pytest.raises(TimeoutError):
        await door()
    assert anyio.current_time() - started == pytest.approx(30)
    assert len(provider.attempts) == 2


async def test_no_attempt_begins_with_less_than_min_remaining() -> None:
    provider = Provider([8.5, FAILURE])
    with pytest.raises(AttemptError):
        await Door(Deadline(10), Retry(backoff=FIXED, min_remaining=1.0), provider=provider)()
    assert len(provider.attempts) == 1


async def test_the_budget_bounds_retries_in_an_outage() -> None:
    provider = Provider(*[FAILURE] * 1000)
    retry = Retry(max_attempts=3, backoff=Backoff(initial=0.001, maximum=0.001, jitter="none"))
    door = Door(retry, provider=provider)
    for _ in range(100):
        with pytest.raises(AttemptError):
            await door()
    # 20 % of 100 calls, and the reserve of 1/s over 10 s.
    assert len(provider.attempts) - 100 == 30


async def test_each_target_has_a_budget_of_its_own() -> None:
    provider = Provider(*[FAILURE] * 1000)
    retry = Retry(max_attempts=2, backoff=Backoff(initial=0.001, maximum=0.001, jitter="none"))
    door = Door(retry, provider=provider)
    for _ in range(50):
        with pytest.raises(AttemptError):
            await door(target="a.example")
    provider.script.clear()
    provider.script.append(FAILURE)
    await door(target="b.example")


@pytest.mark.parametrize(
    ("ambiguous", "status", "repeat_safe", "retry_ambiguous", "attempts"),
    [
        (False, None, True, True, 2),  # nothing was sent
        (False, None, False, False, 2),
        (True, None, True, True, 2),  # sent, nothing received
        (True, None, True, False, 1),
        (True, None, False, True, 1),
        (False, 503, False, True, 1),  # it was sent, and creates things
        (False, 503, True, False, 2),
    ],
)
async def test_rty_06_what_may_have_been_carried_out(
    ambiguous: bool, status: int | None, repeat_safe: bool, retry_ambiguous: bool, attempts: int
) -> None:
    failed = Outcome(
        verdict=Verdict.FAILURE, error_type="x", status=status, retryable=True, ambiguous=ambiguous
    )
    provider = Provider(failed)
    door = Door(Retry(retry_ambiguous=retry_ambiguous), provider=provider)
    if attempts == 1:
        with pytest.raises(AttemptError):
            await door(repeat_safe=repeat_safe)
    else:
        await door(repeat_safe=repeat_safe)
    assert len(provider.attempts) == attempts


async def test_rty_08_an_upload_that_cannot_be_read_twice_is_sent_once() -> None:
    provider = Provider(FAILURE)
    with pytest.raises(AttemptError):
        await Door(Retry(), provider=provider)(body=None)
    assert len(provider.attempts) == 1


async def test_can_03_cancellation_passes_at_once() -> None:
    script: list[list[Step]] = [[5.0, FAILURE]] * 3
    provider = Provider(*script)
    door = Door(Retry(), provider=provider)
    with anyio.move_on_after(2):
        await door()
    assert len(provider.attempts) == 1
    outcome = door.calls[0].outcome
    assert outcome is not None
    assert outcome.error_type == "cancelled"


async def test_can_04_an_exception_that_is_not_the_transports_is_not_retried() -> None:
    provider = Provider(ValueError("a bug in a hook"))
    with pytest.raises(ValueError, match="a bug in a hook"):
        await Door(Retry(), provider=provider)()
    assert len(provider.attempts) == 1


async def test_a_refusal_by_an_open_circuit_is_no_attempt_and_is_not_retried() -> None:
    provider = Provider(*[FAILURE] * 10)
    door = Door(
        Retry(max_attempts=2, backoff=FIXED), CircuitBreaker(consecutive_failures=2), provider=provider
    )
    with pytest.raises(AttemptError):
        await door()
    with pytest.raises(CircuitOpenError):
        await door()
    assert len(provider.attempts) == 2
    assert door.calls[1].attempts == 0


@pytest.mark.parametrize(("waits", "counts"), [([5.0], (0, 0)), ([0.0, 5.0], (1, 0)), ([0.0, 0.0], (2, 1))])
@pytest.mark.parametrize("ends", ["cancelled", "deadline_exceeded"])
async def test_what_is_given_up_before_it_is_sent_is_no_attempt(
    ends: str, waits: list[float], counts: tuple[int, int]
) -> None:
    outer = [Deadline(3.0)] if ends == "deadline_exceeded" else []
    provider = Provider(FAILURE, 5.0)
    door = Door(*outer, knows_what_is_sent, Retry(backoff=FIXED), Gate(*waits), provider=provider)
    with anyio.move_on_after(3.0 if ends == "cancelled" else 10.0), suppress(DeadlineExceededError):
        await door()
    call = door.calls[0]
    assert call.outcome is not None
    assert call.outcome.error_type == ends
    assert (call.attempts, call.retries) == counts
    assert len(provider.attempts) == call.attempts


async def test_the_providers_error_survives_a_circuit_that_opens_between_attempts() -> None:
    provider = Provider(*[FAILURE] * 10)
    door = Door(
        Retry(max_attempts=5, backoff=FIXED), CircuitBreaker(consecutive_failures=2), provider=provider
    )
    with pytest.raises(AttemptError) as raised:
        await door()
    assert raised.value.outcome is FAILURE
    assert len(provider.attempts) == 2


async def test_nothing_is_held_whenever_a_retried_call_is_cancelled() -> None:
    doors: list[Door] = []

    async def scenario() -> None:
        door = Door(
            Deadline(100), Retry(backoff=FIXED), provider=Provider([0.5, FAILURE], [0.5, THROTTLED], 0.5)
        )
        doors.append(door)
        await door()

    async def check() -> None:
        call = doors[-1].calls[0]
        assert call.finished
        assert call.outcome is not None
        assert call.outcome.ok or call.outcome.error_type == "cancelled"

    assert await cancel_at_every_await(scenario, check) >= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts=0"),
        ({"max_retry_after": -1}, "max_retry_after=-1"),
        ({"budget_ratio": 2}, "ratio=2"),
        ({"max_replay_body": -5}, "max_replay_body=-5"),
    ],
)
async def test_options_that_cannot_work_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retry(**options)  # type: ignore[arg-type]


async def test_a_backoff_longer_than_the_deadline_is_a_build_error() -> None:
    slow = Backoff(initial=20, maximum=20, jitter="none")
    with pytest.raises(ConfigurationError, match="no retry fits"):
        Door(Deadline(10), Retry(backoff=slow), provider=Provider())


async def test_a_failed_reply_that_cannot_be_closed_keeps_nobody_from_trying_again() -> None:
    class Unclosable(Nothing):
        async def aclose(self) -> None:
            raise OSError

    async def provider(attempt: Call) -> Reply:
        if attempt.number == 1:
            raise AttemptError(FAILURE, reply=Reply(500, [], Unclosable()))
        attempt.finish(SUCCESS)
        return Reply(200, [], Nothing(), complete=True)

    assert (await Door(Retry(backoff=FIXED), provider=provider)()).status == 200
