"""Building pipelines: order, impossible settings, description, and who owns a lifetime."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import (
    Bulkhead,
    Call,
    CallNext,
    CircuitBreaker,
    ConfigurationError,
    Deadline,
    EventLoopError,
    Outcome,
    Pipeline,
    Policy,
    Reply,
    Retry,
)
from resilient_llm.ordering import Placement
from tests.support import FAILURE, Door, Provider

DEADLINE = Deadline(60)
BULKHEAD = Bulkhead(max_concurrent=1)
RETRY = Retry()
TARGET_BULKHEAD = Bulkhead(max_concurrent=1, key="target", name="target bulkhead")
CIRCUIT = CircuitBreaker()
IN_ORDER: list[Policy] = [DEADLINE, BULKHEAD, RETRY, TARGET_BULKHEAD, CIRCUIT]


class Recorder:
    """A policy of a user's own: notes what passes."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Note the way in, the way out and the end."""
        self.log.append(f"{self.name} in")
        call.on_finish(lambda outcome: self.log.append(f"{self.name} finished {outcome.verdict.value}"))
        try:
            return await call_next(call)
        finally:
            self.log.append(f"{self.name} out")


def test_the_documented_order_is_accepted() -> None:
    Pipeline(IN_ORDER, door="client")


@given(st.permutations(IN_ORDER))
def test_any_other_order_is_refused_unless_it_means_the_same(order: list[Policy]) -> None:
    # The two bulkheads may change places: what a bulkhead limits is decided by where it stands.
    placements = [getattr(policy, "placement") for policy in order]  # noqa: B009
    if placements == [getattr(policy, "placement") for policy in IN_ORDER]:  # noqa: B009
        Pipeline(order, door="client")
        return
    retry, circuit = order.index(RETRY), order.index(CIRCUIT)
    both_inside = min(order.index(BULKHEAD), order.index(TARGET_BULKHEAD)) > retry
    both_outside = max(order.index(BULKHEAD), order.index(TARGET_BULKHEAD)) < retry
    if order[0] is DEADLINE and circuit == 4 and (both_inside or both_outside):
        Pipeline(order, door="client")
        return
    with pytest.raises(ConfigurationError, match=r"must stand before .* in the list of policies"):
        Pipeline(order, door="client")


def test_two_retries_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two policies of one kind"):
        Pipeline([Retry(), Retry()], door="client")


@pytest.mark.parametrize(
    ("policy", "why"), [(Retry(), "replays calls"), (CircuitBreaker(), "no meaning at the ASGI door")]
)
def test_only_admission_stands_at_the_asgi_door(policy: Policy, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Pipeline([policy], door="asgi")


def test_a_class_in_place_of_a_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="did you forget to create it"):
        Pipeline([Retry], door="client")  # type: ignore[list-item]


def test_a_policy_of_ones_own_may_stand_anywhere() -> None:
    log: list[str] = []
    for position in range(len(IN_ORDER) + 1):
        policies = list(IN_ORDER)
        policies.insert(position, Recorder("own", log))
        Pipeline(policies, door="client")


def test_describe_says_what_there_is() -> None:
    description = Pipeline(IN_ORDER, door="client", name="llm").describe()
    assert description.name == "llm"
    assert [(policy.type, policy.level) for policy in description.policies] == [
        ("Deadline", "call"),
        ("Bulkhead", "call"),
        ("Retry", "call"),
        ("Bulkhead", "attempt"),
        ("CircuitBreaker", "attempt"),
    ]
    assert description.policies[0].options["total"] == 60
    assert "target bulkhead(max_concurrent=1" in str(description)


def test_the_boundary_without_a_retry_lies_before_the_circuit() -> None:
    description = Pipeline([BULKHEAD, CIRCUIT], door="client").describe()
    assert [policy.level for policy in description.policies] == ["call", "attempt"]


@pytest.mark.anyio
async def test_lifetimes_attempts_finish_before_their_call_and_in_reverse_order() -> None:
    log: list[str] = []
    door = Door(
        Recorder("a", log),
        Recorder("b", log),
        Retry(),
        _at_attempts(Recorder("c", log)),
        provider=Provider(FAILURE),
    )
    await door()
    assert log == [
        "a in",
        "b in",
        "c in",
        "c out",
        "c finished failure",
        "c in",
        "c finished success",
        "c out",
        "b finished success",
        "a finished success",
        "b out",
        "a out",
    ]


def _at_attempts(policy: Recorder) -> Recorder:
    policy.placement = Placement.CHAOS  # type: ignore[attr-defined]
    return policy


@pytest.mark.anyio
async def test_a_failing_callback_does_not_keep_the_others_from_running() -> None:
    log: list[str] = []

    class Broken:
        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            call.on_finish(_explode)
            return await call_next(call)

    def _explode(_outcome: Outcome) -> None:
        raise RuntimeError("boom")

    door = Door(Recorder("a", log), Broken(), Recorder("b", log), provider=Provider())
    await door()
    assert log.count("a finished success") == 1
    assert log.count("b finished success") == 1


@pytest.mark.anyio
async def test_a_callback_registered_late_runs_at_once() -> None:
    door = Door(provider=Provider())
    await door()
    log: list[Outcome] = []
    door.calls[0].on_finish(log.append)
    assert len(log) == 1
    assert log[0].ok


def test_can_13_a_pipeline_survives_its_event_loop() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    provider = Provider()
    door = Door(bulkhead, Retry(), CircuitBreaker(), provider=provider)

    async def leave_it_held() -> None:
        task = asyncio.create_task(door())
        await task
        provider.duration = 60.0
        asyncio.create_task(door())  # noqa: RUF006 - left behind on purpose
        await asyncio.sleep(0.01)

    asyncio.run(leave_it_held())
    provider.duration = 0.0
    asyncio.run(leave_it_held_not(door))
    assert bulkhead.in_use() == 0


async def leave_it_held_not(door: Door) -> None:
    await door()


def test_use_from_a_second_loop_while_the_first_runs_is_a_clear_error() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    door = Door(bulkhead, provider=Provider())

    async def outer() -> None:
        await door()
        with pytest.raises(EventLoopError, match="another event loop that is still running"):
            await asyncio.to_thread(asyncio.run, door())

    asyncio.run(outer())
