"""A second attempt beside a late one: when there is one, which of them wins, and what is left of the other."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import pytest

from resilient_llm import (
    AttemptError,
    Backoff,
    Bulkhead,
    CircuitBreaker,
    ConfigurationError,
    Deadline,
    DeadlineExceededError,
    Hedge,
    Reply,
    Retry,
)
from resilient_llm.alternatives import Again
from resilient_llm.call import Call
from resilient_llm.outcome import SUCCESS, Outcome, Verdict
from tests.policies.hedging import Attempts, Gate, InTurn, knows_what_is_sent
from tests.support import BAD_REQUEST, FAILURE, THROTTLED, Door, Provider, cancel_at_every_await

pytestmark = pytest.mark.anyio

FIXED = Backoff(initial=1.0, jitter="none")


class Setting:
    """A provider behind a retry, a hedge after 2 seconds, and two targets."""

    def __init__(
        self, *script: Any, retry: bool = True, outer: Any = (), inner: Any = (), **options: Any
    ) -> None:
        self.provider = Provider(*script)
        self.attempts = Attempts()
        self.retry = Retry(backoff=FIXED)
        self.hedge = Hedge(**({"delay": 2.0} | options))
        self.router = InTurn()
        policies = [*outer, *([self.retry] if retry else []), self.hedge, self.router, *inner, self.attempts]
        self.door = Door(*policies, provider=self.provider)

    async def call(self, **options: Any) -> float:
        """Make a call, and give the seconds it took."""
        began = anyio.current_time()
        try:
            await self.door(**options)
        finally:
            self.took = anyio.current_time() - began
        return self.took

    @property
    def last(self) -> Call:
        return self.door.calls[-1]


async def test_a_reply_in_time_is_the_only_one() -> None:
    setting = Setting(1.9)
    assert await setting.call() == pytest.approx(1.9)
    assert setting.attempts.reasons == [(1, "initial", "one")]
    assert setting.last.hedges == 0


@pytest.mark.parametrize("script", [[], [BAD_REQUEST]], ids=["a reply", "an error"])
async def test_after_the_end_of_the_first_there_is_no_second(script: list[Any]) -> None:
    setting = Setting()
    setting.provider.duration = 2.0  # it ends in the very instant in which it is late
    setting.provider.script = script
    with suppress(AttemptError):
        await setting.call()
    assert ("begun", 2) not in setting.attempts.log[setting.attempts.log.index(("ended", 1)) :]


@pytest.mark.parametrize("retry", [True, False])
async def test_a_late_one_is_overtaken_by_one_of_another_target(retry: bool) -> None:
    setting = Setting(30.0, 0.5, retry=retry)
    assert await setting.call() == pytest.approx(2.5)
    assert setting.attempts.reasons == [(1, "initial", "one"), (2, "hedge", "two")]
    assert setting.provider.times == [0.0, 2.0]
    assert setting.attempts.ends == ["cancelled", "success"]
    assert (setting.provider.running, setting.attempts.held) == (0, 0)
    call = setting.last
    assert (call.attempts, call.hedges, call.retries) == (2, 1, 0)
    assert call.outcome is not None
    assert call.outcome.ok


async def test_the_first_may_still_win() -> None:
    setting = Setting(3.0, 30.0)
    assert await setting.call() == pytest.approx(3.0)
    assert setting.attempts.ends == ["success", "cancelled"]
    assert (setting.provider.running, setting.attempts.held) == (0, 0)
    assert setting.last.outcome is not None
    assert setting.last.outcome.ok


@pytest.mark.parametrize("second", [1.0, FAILURE, THROTTLED, BAD_REQUEST, ValueError("a bug")])
async def test_of_two_that_are_ready_at_once_one_is_given_and_nothing_is_left(second: Any) -> None:
    setting = Setting(3.0, [1.0, second] if not isinstance(second, float) else second)
    assert await setting.call() == pytest.approx(3.0)
    assert setting.attempts.held == 0
    assert setting.last.outcome is not None
    assert setting.last.outcome.ok
    assert setting.last.attempts == 2


async def test_a_second_attempt_that_was_not_sent_when_the_first_has_won_is_none() -> None:
    setting = Setting(3.0, outer=[knows_what_is_sent], inner=[Gate(0.0, 30.0)])
    assert await setting.call() == pytest.approx(3.0)
    assert (setting.last.attempts, setting.last.hedges, len(setting.attempts.made)) == (1, 0, 1)


async def test_a_failure_in_time_is_the_retry_s_affair() -> None:
    setting = Setting([1.0, FAILURE], 1.5)
    assert await setting.call() == pytest.approx(1.0 + 1.0 + 1.5)
    assert [reason for _, reason, _ in setting.attempts.reasons] == ["initial", "retry"]
    assert setting.last.hedges == 0


async def test_a_failure_beside_a_second_attempt_is_not_told_while_that_may_succeed() -> None:
    setting = Setting([3.0, FAILURE], 5.0)
    ended: list[float] = []

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setting.call)
        await anyio.sleep(1)
        setting.attempts.made[0].on_finish(lambda _outcome: ended.append(anyio.current_time()))
        began = anyio.current_time() - 1
    assert setting.took == pytest.approx(7.0)
    assert [at - began for at in ended] == pytest.approx(
        [3.0]
    )  # what it held is not kept while the other runs
    assert setting.attempts.ends == ["500", "success"]
    assert setting.last.retries == 0


async def test_when_both_fail_the_first_error_is_raised_and_tells_of_the_other() -> None:
    other = Outcome(verdict=Verdict.FAILURE, error_type="503", status=503, retryable=True)
    setting = Setting([3.0, FAILURE], [2.0, other], retry=False)
    with pytest.raises(AttemptError) as raised:
        await setting.call()
    assert setting.took == pytest.approx(4.0)
    assert raised.value.outcome is FAILURE
    assert "503" in " ".join(raised.value.__notes__)
    assert setting.last.outcome is FAILURE


async def test_a_second_attempt_that_fails_costs_the_first_nothing() -> None:
    setting = Setting(4.0, [1.0, FAILURE])
    assert await setting.call() == pytest.approx(4.0)
    assert setting.attempts.ends == ["success", "500"]
    assert setting.last.retries == 0


async def test_after_both_have_failed_the_retry_goes_on_with_no_further_hedge() -> None:
    setting = Setting([3.0, FAILURE], [2.0, FAILURE], 30.0)
    assert await setting.call() == pytest.approx(4.0 + 1.0 + 30.0)
    assert setting.attempts.reasons == [(1, "initial", "one"), (2, "hedge", "two"), (3, "retry", "one")]
    assert (setting.last.attempts, setting.last.hedges, setting.last.retries) == (3, 1, 1)


async def test_each_attempt_may_have_one_when_more_are_allowed() -> None:
    setting = Setting([3.0, FAILURE], [2.0, FAILURE], 30.0, 1.0, max_hedges=2, budget_ratio=1.0)
    assert await setting.call() == pytest.approx(4.0 + 1.0 + 2.0 + 1.0)
    assert [reason for _, reason, _ in setting.attempts.reasons] == ["initial", "hedge", "retry", "hedge"]
    assert setting.last.hedges == 2


@pytest.mark.parametrize(
    "error",
    [AttemptError(BAD_REQUEST), ValueError("a bug")],
    ids=["a bad request", "a bug"],
)
async def test_what_no_other_target_would_mend_is_raised_at_once(error: Exception) -> None:
    setting = Setting([3.0, error], 30.0, retry=False)
    with pytest.raises(type(error)) as raised:
        await setting.call()
    assert raised.value is error
    assert setting.took == pytest.approx(3.0)
    assert setting.attempts.ends[1] == "cancelled"
    assert (setting.provider.running, setting.attempts.held) == (0, 0)


async def test_an_unexpected_error_of_a_hedge_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting(4.0, [1.0, ValueError("a bug")])
    assert await setting.call() == pytest.approx(4.0)
    assert "a bug" in caplog.text


async def test_a_hedge_that_is_refused_was_none() -> None:
    circuit = CircuitBreaker(consecutive_failures=1, key="target")
    setting = Setting(FAILURE, 4.0, inner=[circuit], retry=False)
    setting.router.targets.reverse()
    with pytest.raises(AttemptError):  # opens the circuit of "two"
        await setting.call()
    setting.router.targets.reverse()
    assert await setting.call() == pytest.approx(4.0)
    call = setting.last
    assert (call.attempts, call.hedges) == (1, 0)
    assert setting.attempts.held == 0


async def test_a_loser_is_no_failure_to_a_circuit_and_holds_no_slot() -> None:
    circuit = CircuitBreaker(consecutive_failures=1, minimum_throughput=1, key="target")
    slots = Bulkhead(max_concurrent=1, max_queued=0, key="target")
    setting = Setting(30.0, 0.5, inner=[slots, circuit])
    await setting.call()
    assert slots.in_use() == 0
    await setting.call()  # of "one" again
    assert setting.attempts.reasons[-1] == (1, "initial", "one")


class Answer:
    """A body that notes when it is closed."""

    def __init__(self) -> None:
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"answer"

    async def aclose(self) -> None:
        self.closed = True


async def test_a_loser_that_cannot_be_stopped_is_closed_when_it_answers_all_the_same() -> None:
    answers: list[Answer] = []

    async def provider(attempt: Call) -> Reply:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(3.0 if attempt.number == 1 else 0.5)
        answers.append(Answer())
        return Reply(200, [], answers[-1])

    door = Door(Retry(), Hedge(delay=2.0), InTurn(), provider=provider)
    reply = await door()
    winner, loser = answers
    assert reply.stream is winner
    assert (winner.closed, loser.closed) == (False, True)
    assert door.calls[0].outcome is None  # it ends with the stream


@pytest.mark.parametrize("first", [True, False], ids=["the first's", "the second's"])
async def test_the_answer_of_one_that_failed_is_closed_when_the_other_wins(first: bool) -> None:
    answer = Answer()

    async def provider(attempt: Call) -> Reply:
        await anyio.sleep({True: 2.5, False: 0.5}[attempt.number == 1])
        if first is (attempt.number == 1):
            raise AttemptError(FAILURE, reply=Reply(500, [], answer))
        await anyio.sleep(4.0)
        attempt.finish(SUCCESS)
        return Reply(200, [], Answer(), complete=True)

    reply = await Door(Hedge(delay=2.0), InTurn(), provider=provider)()
    assert reply.status == 200
    assert answer.closed


# When there is none


@pytest.mark.parametrize(
    "call",
    [{"repeat_safe": False}, {"body": None}, {"deadline": 2.05}],
    ids=["would do harm twice", "cannot be sent twice", "no time is left"],
)
async def test_none_for_a_call(call: dict[str, Any]) -> None:
    setting = Setting(math.inf)
    began = anyio.current_time()
    call = {name: began + value if name == "deadline" else value for name, value in call.items()}
    with anyio.move_on_after(100):
        try:
            await setting.call(**call)
        except DeadlineExceededError:
            assert "deadline" in call
    assert len(setting.provider.attempts) == 1
    assert setting.attempts.held == 0


async def test_none_when_its_own_budget_is_dry() -> None:
    setting = Setting(budget_ratio=0.5)
    took: list[float] = []
    for n in range(7):
        setting.provider.script = [10.0, 1.0 + n]
        took.append(await setting.call())
    # One to begin with, and half of one for each call.
    assert took == pytest.approx([3.0, 4.0, 10.0, 6.0, 10.0, 8.0, 10.0])


async def test_retries_are_no_calls_that_save_for_more() -> None:
    setting = Setting(30.0, 1.0, budget_ratio=0.25)
    assert await setting.call() == pytest.approx(3.0)
    setting.provider.script = [FAILURE, FAILURE]
    await setting.call()
    setting.provider.script = [30.0, 1.0]
    assert await setting.call() == pytest.approx(
        30.0
    )  # three calls have not saved for it, though five attempts would


async def test_none_when_the_budget_of_retries_is_dry() -> None:
    setting = Setting(30.0, 1.0)
    drained = Retry(backoff=FIXED, budget_ratio=0, budget_min_per_second=0)
    door = Door(drained, setting.hedge, setting.router, provider=setting.provider)
    began = anyio.current_time()
    await door()
    assert anyio.current_time() - began == pytest.approx(30.0)
    assert len(setting.provider.attempts) == 1


class Nowhere:
    """A route that has no other target."""

    tries = 1

    def elsewhere(self, call: Call) -> bool:
        return False

    def again_in(self, call: Call, delay: float) -> Again:
        return Again(delay)

    def begin_round(self) -> None:
        """Begin."""

    def next_model(self, call: Call) -> bool:
        return False


async def test_none_when_the_router_has_no_other_target() -> None:
    setting = Setting(30.0, 30.0, 1.0)

    async def routed(call: Call, call_next: Any) -> Any:
        call.route = Nowhere()
        return await call_next(call)

    door = Door(routed, setting.hedge, setting.router, provider=setting.provider)
    began = anyio.current_time()
    await door()
    assert anyio.current_time() - began == pytest.approx(30.0)
    # Nothing was drawn for it: the reserve of one is still there.
    assert await setting.call() == pytest.approx(3.0)


# When the caller leaves


async def test_a_deadline_ends_both() -> None:
    setting = Setting(30.0, 30.0, outer=[Deadline(5)])
    with pytest.raises(DeadlineExceededError):
        await setting.call()
    assert setting.took == pytest.approx(5.0)
    assert setting.attempts.ends == ["deadline_exceeded"] * 2
    assert (setting.provider.running, setting.attempts.held) == (0, 0)


@pytest.mark.parametrize(
    "script",
    [
        (1.0,),
        (30.0, 0.5),
        (3.0, 30.0),
        (3.0, 1.0),
        ([3.0, FAILURE], 5.0),
        ([3.0, FAILURE], [2.0, FAILURE], 1.0),
        ([1.0, FAILURE], 30.0, 0.5),
    ],
    ids=["in time", "second wins", "first wins", "both at once", "first fails", "both fail", "retried"],
)
async def test_a_caller_that_leaves_at_any_await_leaves_nothing(script: tuple[Any, ...]) -> None:
    slots = Bulkhead(max_concurrent=1, key="target")
    setting = Setting(inner=[slots], budget_ratio=1.0)

    async def scenario() -> None:
        setting.provider.script = [list(step) if isinstance(step, list) else step for step in script]
        await setting.door()

    async def check() -> None:
        assert (setting.provider.running, setting.attempts.held, slots.in_use()) == (0, 0, 0)
        assert all(call.finished for call in [*setting.attempts.made, *setting.door.calls])
        await anyio.sleep(30)

    assert await cancel_at_every_await(scenario, check) >= 2


# How it is put together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"percentile": 0.0}, "percentile=0.0"),
        ({"percentile": 1}, "percentile=1"),
        ({"percentile": 95}, "percentile=95"),
        ({"delay": 0}, "delay=0"),
        ({"delay": math.inf}, "delay=inf"),
        ({"at_least": -1.0}, "at_least=-1.0"),
        ({"max_medians": 0.5}, "max_medians=0.5"),
        ({"min_samples": 0}, "min_samples=0"),
        ({"window": 0}, "window=0"),
        ({"max_hedges": 0}, "max_hedges=0"),
        ({"min_remaining": -0.1}, "min_remaining=-0.1"),
        ({"budget_ratio": 1.5}, "budget_ratio=1.5"),
        ({"max_burst": 0}, "max_burst=0"),
        ({"key": "colour"}, "key='colour'"),
        ({"max_keys": 0}, "max_keys=0"),
        ({"name": ""}, "name=''"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Hedge(**options)


def test_it_needs_a_router() -> None:
    with pytest.raises(ConfigurationError, match="hedge needs a Router after it"):
        Door(Retry(), Hedge(), provider=Provider())


def test_it_stands_between_the_retry_and_the_router() -> None:
    for wrong in ([Hedge(), Retry(), InTurn()], [InTurn(), Hedge()], [Hedge(), Hedge(), InTurn()]):
        with pytest.raises(ConfigurationError):
            Door(*wrong, provider=Provider())  # type: ignore[arg-type]


def test_it_must_fit_the_deadline() -> None:
    with pytest.raises(ConfigurationError, match=r"no hedge fits.*deadline of 2 s.*=2 s"):
        Door(Deadline(2), Hedge(delay=2), InTurn(), provider=Provider())
    Door(Deadline(2), Hedge(), InTurn(), provider=Provider())
