"""Where attempts go: failover, fallback chains, cooling, credentials, windows, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from resilient_llm import (
    AttemptError,
    Bulkhead,
    BulkheadFullError,
    Call,
    CallNext,
    CircuitBreaker,
    ConfigurationError,
    Deadline,
    NoTargetError,
    Reply,
    Retry,
    Router,
    UnknownModelError,
)
from resilient_llm.credentials import Credential
from resilient_llm.outcome import Outcome, Scope, Usage, Verdict
from resilient_llm.pricing import Price
from tests.routing.upstreams import (
    DEAD_KEY,
    FIXED,
    OVERLOADED,
    SILENT,
    TOO_LONG,
    Upstreams,
    door,
    router,
    target,
    throttled,
)
from tests.support import BAD_REQUEST, FAILURE, THROTTLED, Door, Nothing, cancel_at_every_await

pytestmark = pytest.mark.anyio


async def test_a_failure_goes_at_once_to_an_untried_equivalent() -> None:
    upstreams = Upstreams(a=[FAILURE])
    one = door(upstreams, router([target("a"), target("b")]))
    await one()
    assert upstreams.asked == [("a", 0.0), ("b", 0.0)]
    assert one.calls[0].fallbacks == 0
    assert [attempt.reason for attempt in upstreams.attempts] == ["initial", "retry"]


async def test_each_target_is_tried_once_a_round_and_then_after_backoff_again() -> None:
    upstreams = Upstreams(a=[FAILURE, FAILURE], b=[FAILURE])
    await door(upstreams, router([target("a"), target("b")]), retry=Retry(max_attempts=4, backoff=FIXED))()
    assert upstreams.asked == [("a", 0.0), ("b", 0.0), ("a", 2.0), ("b", 2.0)]


async def test_moving_draws_on_attempts_and_not_on_the_budget() -> None:
    upstreams = Upstreams(a=[FAILURE] * 9, b=[FAILURE] * 9, c=[FAILURE] * 9)
    retry = Retry(max_attempts=2, backoff=FIXED, budget_ratio=0, budget_min_per_second=0)
    with pytest.raises(AttemptError):
        await door(upstreams, router([target("a"), target("b"), target("c")]), retry=retry)()
    assert upstreams.names == ["a", "b"]


async def test_what_is_the_requests_fault_is_sent_nowhere_else() -> None:
    upstreams = Upstreams(a=[BAD_REQUEST])
    with pytest.raises(AttemptError):
        await door(upstreams, router([target("a"), target("b")]))()
    assert upstreams.names == ["a"]


async def test_a_refused_filter_is_sent_nowhere_else() -> None:
    filtered = Outcome(verdict=Verdict.FATAL, scope=Scope.REQUEST, error_type="content_filter", status=400)
    upstreams = Upstreams(a=[filtered])
    with pytest.raises(AttemptError):
        await door(upstreams, router({"m": [target("a")], "n": [target("b")]}, fallbacks={"m": "n"}))(
            model="m"
        )
    assert upstreams.names == ["a"]


async def test_another_model_comes_only_when_the_first_has_had_its_attempts() -> None:
    upstreams = Upstreams(a=[FAILURE] * 3)
    one = door(upstreams, router({"m": target("a"), "n": target("b")}, fallbacks={"m": ["n"]}))
    await one(model="m")
    assert upstreams.asked == [("a", 0.0), ("a", 1.0), ("a", 3.0), ("b", 3.0)]
    assert upstreams.attempts[-1].reason == "fallback"
    assert one.calls[0].fallbacks == 1


async def test_one_500_is_answered_by_the_same_model_again() -> None:
    upstreams = Upstreams(a=[FAILURE])
    await door(upstreams, router({"m": target("a"), "n": target("b")}, fallbacks={"m": ["n"]}))(model="m")
    assert upstreams.names == ["a", "a"]


async def test_a_short_retry_after_is_answered_by_the_same_model_again() -> None:
    upstreams = Upstreams(a=[throttled(2.0)])
    await door(upstreams, router({"m": target("a"), "n": target("b")}, fallbacks={"m": ["n"]}))(model="m")
    assert upstreams.names == ["a", "a"]
    assert 2.0 <= upstreams.asked[1][1] <= 2.2


async def test_a_long_retry_after_is_answered_by_the_next_model_at_once() -> None:
    upstreams = Upstreams(a=[throttled(60.0)])
    await door(upstreams, router({"m": target("a"), "n": target("b")}, fallbacks={"m": ["n"]}))(model="m")
    assert upstreams.asked == [("a", 0.0), ("b", 0.0)]


async def test_each_model_of_a_chain_has_attempts_of_its_own() -> None:
    upstreams = Upstreams(a=[FAILURE] * 9, b=[FAILURE] * 9)
    chain = router({"m": target("a"), "n": target("b")}, fallbacks={"m": ["n"]})
    with pytest.raises(AttemptError):
        await door(upstreams, chain, retry=Retry(max_attempts=2, backoff=FIXED))(model="m")
    assert upstreams.names == ["a", "a", "b", "b"]


async def test_a_silent_target_is_not_asked_again_while_there_is_another() -> None:
    upstreams = Upstreams(a=[SILENT] * 9)
    await door(upstreams, router({"m": target("a"), "n": target("b")}, fallbacks={"m": ["n"]}))(model="m")
    assert upstreams.names == ["a", "b"]


async def test_two_silent_equivalents_are_asked_once_each() -> None:
    upstreams = Upstreams(a=[SILENT] * 9, b=[SILENT] * 9)
    with pytest.raises(AttemptError):
        await door(
            upstreams, router([target("a"), target("b")]), retry=Retry(max_attempts=9, backoff=FIXED)
        )()
    assert upstreams.names == ["a", "b"]


async def test_the_only_target_is_asked_again_even_if_it_was_silent() -> None:
    upstreams = Upstreams(a=[SILENT])
    await door(upstreams, router([target("a")]))()
    assert upstreams.names == ["a", "a"]


async def test_targets_that_could_not_carry_the_call_out_do_not_count_as_others() -> None:
    upstreams = Upstreams(a=[SILENT])
    other = target("b", dialect="anthropic")
    await door(upstreams, router({"m": [target("a"), other], "n": other}, fallbacks={"m": ["n"]}))(model="m")
    assert upstreams.names == ["a", "a"]


async def test_a_prompt_that_is_too_long_goes_only_to_a_larger_window() -> None:
    upstreams = Upstreams(a=[TOO_LONG])
    models = {
        "m": [target("a", context_window=8_000), target("b", context_window=8_000)],
        "small": target("c", context_window=4_000),
        "large": target("d", context_window=100_000),
    }
    await door(upstreams, router(models, fallbacks={"m": ["small", "large"]}))(model="m")
    assert upstreams.names == ["a", "d"]


async def test_a_prompt_that_is_too_long_for_all_fails_as_the_provider_said() -> None:
    upstreams = Upstreams(a=[TOO_LONG])
    with pytest.raises(AttemptError) as raised:
        await door(
            upstreams, router([target("a", context_window=8_000), target("b", context_window=8_000)])
        )()
    assert raised.value.outcome.error_type == "context_length_exceeded"
    assert upstreams.names == ["a"]


async def test_targets_whose_window_is_too_small_are_passed_over() -> None:
    upstreams = Upstreams()
    models = [target("a", context_window=10), target("b", context_window=10_000)]
    body = b'{"messages": [{"role": "user", "content": "' + b"word " * 100 + b'"}]}'
    await door(upstreams, router(models))(body=body)
    assert upstreams.names == ["b"]


async def test_a_refusal_below_costs_no_attempt_and_goes_to_the_next() -> None:
    upstreams = Upstreams(a=[10.0])
    full = Bulkhead(max_concurrent=1, max_queued=0, key="target")
    one = door(upstreams, router([target("a", policies=[full]), target("b")]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.sleep(0.1)
        await one()
    assert upstreams.names == ["a", "b"]
    assert [call.attempts for call in one.calls] == [1, 1]


async def test_when_all_refuse_the_refusal_that_passes_first_is_raised() -> None:
    upstreams = Upstreams(a=[10.0])
    full = Bulkhead(max_concurrent=1, max_queued=0, key="target")
    one = door(upstreams, router([target("a", policies=[full])]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.sleep(0.1)
        with pytest.raises(BulkheadFullError):
            await one()


async def test_an_open_circuit_is_passed_over_and_a_probe_brings_traffic_back() -> None:
    upstreams = Upstreams(a=[FAILURE] * 2)
    breaker = CircuitBreaker(consecutive_failures=2, break_duration=5.0)
    one = door(upstreams, router([target("a", policies=[breaker]), target("b")]))
    for _ in range(4):
        await one()
    assert upstreams.names == ["a", "b", "a", "b", "b", "b"]
    await anyio.sleep(5.1)
    await one()
    assert upstreams.names[-1] == "a"


async def test_a_circuit_in_the_pipeline_is_one_for_each_target() -> None:
    upstreams = Upstreams(a=[FAILURE] * 2)
    one = Door(
        Retry(backoff=FIXED),
        router([target("a"), target("b")]),
        CircuitBreaker(consecutive_failures=2),
        provider=upstreams,
    )
    for _ in range(3):
        await one()
    assert upstreams.names == ["a", "b", "a", "b", "b"]


async def test_with_every_circuit_open_the_refusal_says_when() -> None:
    upstreams = Upstreams(a=[FAILURE], b=[FAILURE])
    slow = CircuitBreaker(consecutive_failures=1, break_duration=20.0, max_break_duration=20.0)
    quick = CircuitBreaker(consecutive_failures=1, break_duration=5.0)
    one = door(
        upstreams,
        router([target("a", policies=[slow]), target("b", policies=[quick])]),
        retry=Retry(max_attempts=2, backoff=FIXED),
    )
    with pytest.raises(AttemptError):
        await one()
    with pytest.raises(NoTargetError) as raised:
        await one()
    assert raised.value.retry_after == pytest.approx(5.0)
    assert raised.value.rejected == ("a:circuit_open", "b:circuit_open")


async def test_a_call_that_has_failed_waits_for_the_first_circuit_that_reopens() -> None:
    upstreams = Upstreams(a=[FAILURE], b=[FAILURE])
    slow = CircuitBreaker(consecutive_failures=1, break_duration=20.0)
    quick = CircuitBreaker(consecutive_failures=1, break_duration=5.0)
    targets = [target("a", policies=[slow]), target("b", policies=[quick])]
    await door(upstreams, router(targets, patience=6.0))()
    assert upstreams.asked == [("a", 0.0), ("b", 0.0), ("b", 5.0)]


async def test_it_does_not_wait_for_longer_than_it_is_patient() -> None:
    upstreams = Upstreams(a=[FAILURE])
    breaker = CircuitBreaker(consecutive_failures=1, break_duration=5.0)
    with pytest.raises(AttemptError):
        await door(upstreams, router([target("a", policies=[breaker])], patience=4.0))()
    assert upstreams.names == ["a"]


async def test_a_model_with_every_circuit_open_is_stood_in_for_by_the_next() -> None:
    upstreams = Upstreams(a=[FAILURE])
    breaker = CircuitBreaker(consecutive_failures=1)
    chain = router({"m": target("a", policies=[breaker]), "n": target("b")}, fallbacks={"m": ["n"]})
    one = door(upstreams, chain, retry=Retry(max_attempts=1))
    await one(model="m")
    await one(model="m")
    assert upstreams.names == ["a", "b", "b"]
    assert [call.fallbacks for call in one.calls] == [1, 1]


async def test_a_throttled_target_cools_down_for_every_call() -> None:
    upstreams = Upstreams(a=[throttled(30.0)])
    one = door(upstreams, router([target("a"), target("b")]))
    await one()
    await one()
    assert upstreams.names == ["a", "b", "b"]
    await anyio.sleep(34.0)
    await one()
    assert upstreams.names[-1] == "a"


async def test_while_all_cool_down_a_call_waits_and_is_never_early() -> None:
    upstreams = Upstreams(a=[throttled(4.0)], b=[throttled(6.0)])
    one = door(upstreams, router([target("a"), target("b")]), retry=Retry(max_attempts=2, backoff=FIXED))
    with pytest.raises(AttemptError):
        await one()
    await one()
    assert upstreams.names == ["a", "b", "a"]
    assert 4.0 <= upstreams.asked[-1][1] <= 4.4
    assert one.calls[-1].wait_time == pytest.approx(upstreams.asked[-1][1])


async def test_a_call_that_cannot_wait_for_them_is_told_when() -> None:
    upstreams = Upstreams(a=[throttled(50.0)])
    one = door(upstreams, router([target("a")], max_wait=20.0), retry=Retry(max_attempts=1))
    with pytest.raises(AttemptError):
        await one()
    with pytest.raises(NoTargetError) as raised:
        await one()
    assert raised.value.retry_after is not None
    assert 50.0 <= raised.value.retry_after <= 55.0


async def test_a_dead_credential_makes_room_for_another_of_the_same_target() -> None:
    upstreams = Upstreams(a=[DEAD_KEY])
    keys = [Credential(name="one", value=lambda: "k1"), Credential(name="two", value=lambda: "k2")]
    one = door(upstreams, router([target("a", url="https://a.test/v1", provider="openai", credentials=keys)]))
    await one()
    sent = [attempt.request.header(b"authorization") for attempt in upstreams.attempts]
    assert sent == [b"Bearer k1", b"Bearer k2"]
    await one()
    assert upstreams.attempts[-1].request.header(b"authorization") == b"Bearer k2"


async def test_a_dead_credential_of_the_only_kind_goes_elsewhere() -> None:
    upstreams = Upstreams(a=[DEAD_KEY] * 9)
    await door(upstreams, router([target("a"), target("b")]))()
    assert upstreams.names == ["a", "b"]


async def test_the_attempt_is_named_after_its_target_and_model() -> None:
    upstreams = Upstreams()
    one = door(upstreams, router([target("azure", provider="azure.ai.openai", model="gpt-4o-eu")]))
    reply = await one(model="gpt-4o", body=b'{"model": "gpt-4o"}')
    attempt = upstreams.attempts[0]
    assert (attempt.model, attempt.profile.provider) == ("gpt-4o-eu", "azure.ai.openai")
    assert attempt.request.json["model"] == "gpt-4o-eu"
    assert one.calls[0].model == "gpt-4o"
    assert (b"x-resilient-llm-target", b"azure") in reply.headers


async def test_after_a_refusal_the_next_target_gets_the_original_request() -> None:
    upstreams = Upstreams(a=[10.0])
    full = Bulkhead(max_concurrent=1, max_queued=0, key="target")
    one = door(upstreams, router([target("a", model="for-a", policies=[full]), target("b")]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: one(model="m", body=b'{"model":"m"}'))
        await anyio.sleep(0.1)
        await one(model="m", body=b'{"model":"m"}')
    assert [attempt.request.json["model"] for attempt in upstreams.attempts] == ["for-a", "m"]
    assert [attempt.model for attempt in upstreams.attempts] == ["for-a", "m"]


async def test_an_unknown_model_is_refused_with_those_that_are_known() -> None:
    one = door(Upstreams(), router({"m": target("a"), "n": target("b")}))
    with pytest.raises(UnknownModelError, match=r"'x'.*'m', 'n'"):
        await one(model="x")


async def test_an_unknown_model_goes_to_the_default() -> None:
    upstreams = Upstreams()
    await door(upstreams, router({"m": target("a"), "n": target("b")}, default="n"))(model="x")
    assert upstreams.names == ["b"]


async def test_a_policy_above_may_choose_the_model() -> None:
    class Choose:
        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            call.logical_model = "n"
            return await call_next(call)

    upstreams = Upstreams()
    one = Door(Choose(), Retry(), router({"m": target("a"), "n": target("b")}), provider=upstreams)
    await one(model="m")
    assert upstreams.names == ["b"]


async def test_without_retry_there_is_one_attempt_and_refusals_still_move_on() -> None:
    upstreams = Upstreams(a=[FAILURE])
    one = Door(router([target("a"), target("b")]), provider=upstreams)
    with pytest.raises(AttemptError):
        await one()
    assert upstreams.names == ["a"]


async def test_costs_of_all_attempts_add_up() -> None:
    class Billed(Upstreams):
        async def __call__(self, attempt: Call) -> Reply:
            attempt.mark_sent()
            usage = Usage(input_tokens=1_000, output_tokens=100)
            self.asked.append((attempt.target.name, 0.0))
            if attempt.target.name == "a":
                raise AttemptError(
                    Outcome(verdict=Verdict.FAILURE, error_type="truncated", retryable=True, usage=usage)
                )
            attempt.finish(Outcome(verdict=Verdict.SUCCESS, usage=usage))
            return Reply(200, [], Nothing(), complete=True)

    dear, cheap = Price(input=10.0, output=30.0), Price(input=1.0, output=2.0)
    one = door(Billed(), router([target("a", price=dear), target("b", price=cheap)]))
    await one()
    assert one.calls[0].cost == pytest.approx((10_000 + 3_000 + 1_000 + 200) / 1e6)


async def test_the_deadline_ends_a_wait_for_targets() -> None:
    upstreams = Upstreams(a=[throttled(8.0)])
    one = Door(Deadline(5.0), Retry(max_attempts=1), router([target("a")]), provider=upstreams)
    with pytest.raises(AttemptError):
        await one()
    with pytest.raises(NoTargetError):
        await one()


async def test_cancelled_at_any_point_nothing_is_left_in_flight() -> None:
    routing = router([target("a", policies=[Bulkhead(max_concurrent=1, key="target")]), target("b")])

    async def scenario() -> None:
        upstreams = Upstreams(a=[throttled(1.0), 1.0], b=[FAILURE, 1.0])
        await door(upstreams, routing)()
        await door(upstreams, routing)()

    async def check() -> None:
        health = routing.health()
        assert [report.in_flight for report in health.targets] == [0, 0]
        await anyio.sleep(100)

    assert await cancel_at_every_await(scenario, check) >= 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Router([]), "at least one"),
        (lambda: Router({}), "there are none"),
        (lambda: Router("abc"), "allowed are lists of Target"),  # type: ignore[arg-type]
        (lambda: Router([target("a"), target("a")]), "two of them are called 'a'"),
        (lambda: Router({"m": target("a")}, fallbacks={"m": "x"}), "'x' has no targets"),
        (lambda: Router({"m": target("a")}, fallbacks={"m": "m"}), "no fallback for itself"),
        (lambda: Router({"m": target("a")}, default="x"), "'x' has no targets"),
        (lambda: Router([target("a")], patience=-1), "patience=-1"),
        (lambda: Router(["a"]), "is no Target"),  # type: ignore[list-item]
        (lambda: Router([target("a")], balancer=1), "balancer=1"),  # type: ignore[arg-type]
    ],
)
def test_options_that_cannot_work_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


async def test_a_throttle_without_a_hint_cools_down_for_a_moment() -> None:
    upstreams = Upstreams(a=[THROTTLED])
    one = door(upstreams, router([target("a"), target("b")], cool_down=3.0))
    await one()
    await one()
    assert upstreams.names == ["a", "b", "b"]
    await anyio.sleep(3.4)
    await one()
    assert upstreams.names[-1] == "a"


async def test_overload_of_the_upstream_moves_on_too() -> None:
    upstreams = Upstreams(a=[OVERLOADED])
    await door(upstreams, router([target("a"), target("b")]))()
    assert upstreams.names == ["a", "b"]


async def test_a_credential_that_is_kept_for_a_purpose_is_used_for_it() -> None:
    upstreams = Upstreams()
    keys = [
        Credential(name="batch", value=lambda: "k-batch", purposes={"batch"}),
        Credential(name="any", value=lambda: "k-any"),
    ]
    one = door(upstreams, router([target("a", url="https://a.test/v1", provider="openai", credentials=keys)]))

    class Batch:
        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            call.purpose = "batch"
            return await call_next(call)

    await one()
    batch = Door(Batch(), Retry(), *one.pipeline.policies[1:], provider=upstreams)
    await batch()
    await batch()
    sent = [attempt.request.header(b"authorization") for attempt in upstreams.attempts]
    assert sent[0] == b"Bearer k-any"
    assert b"Bearer k-batch" in sent[1:]
