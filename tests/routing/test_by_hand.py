"""Targets that are set aside, taken back and weighed by hand, and routers that take over from another."""

from __future__ import annotations

import logging
import threading
from typing import Any

import anyio
import pytest

from resilient_llm import (
    AttemptError,
    CircuitBreaker,
    CircuitState,
    ConfigurationError,
    NoTargetError,
    Retry,
    Router,
)
from resilient_llm.policies._keyed import is_of_target
from resilient_llm.routing.balancers import PeakEWMA, Priority, WeightedLeastConnections, WeightedRandom
from tests.routing.test_stored_answers import Storing, asking
from tests.routing.upstreams import (
    DEAD_KEY,
    FIXED,
    OVERLOADED,
    SILENT,
    Upstreams,
    door,
    key,
    keyed,
    router,
    target,
    throttled,
)
from tests.signals import Recording
from tests.support import Door
from tests.telemetry.observed import telemetry_of

pytestmark = pytest.mark.anyio


def by_hand(routing: Router) -> dict[str, tuple[str, ...]]:
    return {one.name: tuple(one.by_hand) for one in routing.health().targets}


async def test_nothing_is_sent_to_a_target_that_is_set_aside_until_it_is_restored() -> None:
    upstreams = Upstreams()
    routing = router([target("a"), target("b")], balancer=Priority())
    one = door(upstreams, routing)
    routing.isolate("a")  # before the first call
    await one()
    assert upstreams.names == ["b"]
    first = routing.health().targets[0]
    assert (first.healthy, first.circuit, tuple(first.by_hand)) == (False, "isolated", ("isolated",))
    routing.isolate("b")
    with pytest.raises(NoTargetError, match="a:isolated, b:isolated") as refused:
        await one()
    assert (refused.value.status, refused.value.retry_after) == (503, None)
    routing.restore("a")
    await one()
    assert upstreams.names == ["b", "a"]
    assert by_hand(routing) == {"a": (), "b": ("isolated",)}


async def test_a_failed_attempt_is_not_made_again_at_a_target_that_was_set_aside_meanwhile() -> None:
    upstreams = Upstreams(a=[OVERLOADED])
    routing = router([target("a")])
    one = door(upstreams, routing, retry=Retry(max_attempts=3, backoff=FIXED))
    async with anyio.create_task_group() as tasks:
        failed: list[type[BaseException]] = []

        async def call() -> None:
            try:
                await one()
            except (AttemptError, NoTargetError) as error:
                failed.append(type(error))

        tasks.start_soon(call)
        await anyio.sleep(0.01)
        routing.isolate("a")
    assert len(failed) == 1
    assert upstreams.names == ["a"]


async def test_a_target_that_is_set_aside_is_no_other_for_one_that_was_silent() -> None:
    upstreams = Upstreams(a=[SILENT])
    routing = router([target("a"), target("b")])
    routing.isolate("b")
    await door(upstreams, routing)()
    assert upstreams.names == ["a", "a"]


async def test_it_is_set_aside_from_another_thread() -> None:
    upstreams = Upstreams()
    routing = router([target("a"), target("b")], balancer=Priority())
    one = door(upstreams, routing)
    await one()
    thread = threading.Thread(target=routing.isolate, args=("a",))
    thread.start()
    thread.join()
    await anyio.lowlevel.checkpoint()
    await anyio.sleep(0.01)
    await one()
    assert upstreams.names == ["a", "b"]


async def test_a_weight_by_hand_counts_at_once() -> None:
    upstreams = Upstreams()
    routing = router([target("a"), target("b")], balancer=WeightedRandom())
    one = door(upstreams, routing)
    for _ in range(200):
        await one()
    assert 60 < upstreams.names.count("a") < 140
    routing.set_weight("a", 1e-6)
    assert by_hand(routing) == {"a": ("weight",), "b": ()}
    del upstreams.asked[:]
    for _ in range(200):
        await one()
    assert upstreams.names.count("a") < 5
    routing.set_weight("a", 1)
    assert by_hand(routing) == {"a": (), "b": ()}
    del upstreams.asked[:]
    for _ in range(200):
        await one()
    assert 60 < upstreams.names.count("a") < 140


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan"), True, "2", None])
def test_a_weight_must_be_one(weight: object) -> None:
    routing = router([target("a")])
    with pytest.raises(ConfigurationError, match="weight="):
        routing.set_weight("a", weight)  # type: ignore[arg-type]
    for change in (routing.isolate, routing.restore):
        with pytest.raises(ConfigurationError, match="no target is called so"):
            change("b")


async def test_each_change_is_logged_and_told_on_the_span_of_the_next_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recording = Recording()
    routing = router([target("a"), target("b")])
    one = Door(routing, provider=Upstreams(), telemetry=telemetry_of(recording))
    with caplog.at_level(logging.INFO, logger="resilient_llm"):
        routing.isolate("a")
        routing.set_weight("b", 3)
    assert [record.getMessage() for record in caplog.records] == [
        "router='router' target='a' changed='isolated' weight=1",
        "router='router' target='b' changed='weighted' weight=3",
    ]
    await one()
    await one()
    first, second = recording.spans.named("chat")
    assert [event.attributes for event in first.events] == [
        {
            "resilient_llm.target.name": name,
            "resilient_llm.target.changed": changed,
            "resilient_llm.target.weight": weight,
        }
        for name, changed, weight in (("a", "isolated", 1.0), ("b", "weighted", 3))
    ]
    assert first.event_names() == ["resilient_llm.target.change"] * 2
    assert second.event_names() == []


# Another router in the place of one


async def test_a_router_that_takes_over_knows_what_the_other_one_knew() -> None:
    upstreams = Upstreams(a=[2.0, 2.0], b=[0.1, 0.1])
    a, b = target("a"), target("b")
    old = router([a, b], balancer=PeakEWMA())
    one = door(upstreams, old)
    for _ in range(2):
        await one()
    quick = upstreams.names[-1]
    assert set(upstreams.names) == {"a", "b"}
    while upstreams.names[-2:] != ["b", "b"]:  # it has found out who is quick
        await one()
    new = router([a, b, target("c", weight=1e-6)], balancer=PeakEWMA())
    new.take_over(old)
    del upstreams.asked[:]
    before, after = old.health().targets, new.health().targets
    assert quick in "ab"
    assert [one.time_to_first_token for one in after[:2]] == [one.time_to_first_token for one in before]
    assert after[2].attempts == 0
    one = door(upstreams, new)
    await one()
    assert upstreams.names[0] != "a"


async def test_calls_that_the_old_router_still_has_count_in_the_new_one() -> None:
    upstreams = Upstreams(a=[5.0])
    shared, gone = target("a"), target("gone")
    old = router([shared, gone])
    one = door(upstreams, old)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.sleep(1)
        new = router([shared, target("b")], balancer=WeightedLeastConnections())
        new.take_over(old)
        assert [one.in_flight for one in new.health().targets] == [1, 0]
        for _ in range(5):
            await door(upstreams, new)()
        assert upstreams.names == ["a"] + ["b"] * 5
    assert [one.in_flight for one in new.health().targets] == [0, 0]
    assert new.health().targets[0].attempts == 1


async def test_cool_downs_and_dead_credentials_are_known_after_a_take_over() -> None:
    upstreams = Upstreams(a=[throttled(30.0)], b=[DEAD_KEY])
    a, b = target("a"), keyed("b", key("b1"))
    old = router([a, b])
    one = door(upstreams, old, retry=Retry(max_attempts=1))
    for _ in range(2):
        with anyio.move_on_after(1), pytest.raises(AttemptError):
            await one()
    new = router([a, b], cool_down=3.0, slow_start=5.0)
    new.take_over(old)
    health = new.health()
    assert health.targets[0].cooling_down == 29.0
    assert [key.state for key in health.targets[1].credentials] == ["set_aside"]
    assert new._fleet.deployment("a").cooling.usual == 3.0  # type: ignore[union-attr]


async def test_who_is_set_aside_stays_so_and_weights_by_hand_end_with_a_take_over() -> None:
    upstreams = Upstreams()
    a = target("a")
    old = router([a, target("b")])
    await door(upstreams, old)()
    old.isolate("b")
    old.isolate("a")
    old.set_weight("a", 5)
    new = router([a, target("b")])  # this b is another one, of the same name
    new.take_over(old)
    assert by_hand(new) == {"a": ("isolated",), "b": ("isolated",)}
    assert [one.weight for one in new.health().targets] == [1, 1]
    without = router([target("c")])
    without.take_over(new)
    again = router([a, target("c")])
    again.take_over(without)
    assert by_hand(again) == {"a": (), "c": ()}


async def test_stored_answers_are_found_after_a_take_over() -> None:
    upstreams = Storing()
    a, b = (target(name, url=f"https://{name}.test/v1") for name in "ab")
    old = router([a, b], balancer=Priority())
    await asking(upstreams, old, model="m")()
    assert upstreams.names == ["a"]
    new = router([b, a], balancer=Priority())
    new.take_over(old)
    await asking(upstreams, new, model="m", previous_response_id="resp_a0")()
    await asking(upstreams, new, model="m")()
    assert upstreams.names == ["a", "a", "b"]


async def test_circuits_are_closed_when_a_target_is_restored_that_was_never_asked() -> None:
    circuit = CircuitBreaker(consecutive_failures=1)
    routing = router([target("a", policies=[circuit])])
    circuit.isolate("a")
    with pytest.raises(NoTargetError):
        await door(Upstreams(), routing)()
    routing.restore("a")
    await door(Upstreams(), routing)()


async def test_a_router_that_has_not_been_used_has_nothing_to_be_taken_over() -> None:
    old, new = router([target("a")]), router([target("a")])
    new.take_over(old)
    await door(Upstreams(), new)()
    assert new.health().attempts == 1


async def test_whose_a_circuit_is_its_key_says_by_the_place_of_the_target_in_it() -> None:
    circuit = CircuitBreaker(key=("model", "target"), consecutive_failures=1)
    upstreams = Upstreams(gpt4=[OVERLOADED])
    shared = router({"a": [target("gpt4", model="a")], "gpt4": [target("a", model="gpt4")]})
    one = Door(Retry(max_attempts=1), shared, circuit, provider=upstreams)
    with pytest.raises(AttemptError):
        await one(model="a")
    assert circuit.states() == {("a", "gpt4"): CircuitState.OPEN}
    assert circuit.keys_of("gpt4") == [("a", "gpt4")]
    assert circuit.keys_of("a") == []  # it is only a model's name there
    shared.restore("a")
    assert circuit.state(("a", "gpt4")) is CircuitState.OPEN
    shared.restore("gpt4")
    assert circuit.state(("a", "gpt4")) is CircuitState.CLOSED


@pytest.mark.parametrize(
    ("key", "value", "its"),
    [
        ("target", "a", True),
        (("target",), "a", True),
        (("tenant", "target"), ("b", "a"), True),
        (("tenant", "target"), ("a", "b"), False),
        (("tenant", "model"), ("a", "a"), False),
        ("model", "a", False),
        (str, "a", True),
        (str, ("a", "b"), False),
    ],
)
def test_of_what_functions_give_a_targets_name_is_its(key: Any, value: Any, its: bool) -> None:
    assert is_of_target(key, value, "a") is its
