"""Keys of a target: dead ones, busy ones, throttled ones, shared ones, and what is told of them."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence

import anyio
import pytest

from resilient_llm import AttemptError, Credential, DeadlineExceededError, NoTargetError, Retry
from resilient_llm.outcome import SUCCESS
from tests.routing.upstreams import DEAD_KEY, FIXED, Keys, door, key, keyed, router, throttled
from tests.support import FAILURE, Door, cancel_at_every_await

pytestmark = pytest.mark.anyio

ONCE = Retry(max_attempts=1, backoff=FIXED)


async def at_once(one: Door, calls: int, *, model: str = "m") -> float:
    """Make so many calls together and give how long they take."""
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(calls):
            tasks.start_soon(lambda: one(model=model))
    return anyio.current_time() - began


# Dead keys


async def test_a_new_call_does_not_wait_for_a_dead_key_and_is_told_when() -> None:
    upstreams = Keys(k=[DEAD_KEY])
    one = door(upstreams, router([keyed("a", key("k"))]))
    with pytest.raises(AttemptError):
        await one()
    began = anyio.current_time()
    with pytest.raises(NoTargetError) as raised:
        await one()
    assert anyio.current_time() == began
    assert raised.value.rejected == ("a:no_credential",)
    assert raised.value.retry_after == pytest.approx(60.0)
    await anyio.sleep(60)
    await one()
    assert upstreams.names == ["k", "k"]


async def test_with_a_dead_key_the_next_model_answers_at_once() -> None:
    upstreams = Keys(k=[DEAD_KEY] * 9)
    one = door(
        upstreams, router({"m": keyed("a", key("k")), "n": keyed("b", key("l"))}, fallbacks={"m": "n"})
    )
    for _ in range(3):
        await one(model="m")
    assert upstreams.asked == [("k", 0.0), ("l", 0.0), ("l", 0.0), ("l", 0.0)]


@pytest.mark.parametrize(("patience", "asked"), [(6.0, [("k", 0.0), ("k", 5.0)]), (4.0, [("k", 0.0)])])
async def test_a_call_that_has_failed_waits_for_its_key_as_long_as_it_is_patient(
    patience: float, asked: Sequence[tuple[str, float]]
) -> None:
    upstreams = Keys(k=[dataclasses.replace(DEAD_KEY, retry_after=5.0)])
    one = door(upstreams, router([keyed("a", key("k"))], patience=patience))
    if len(asked) > 1:
        await one()
    else:
        with pytest.raises(AttemptError):
            await one()
    assert upstreams.asked == asked


async def test_dead_keys_cost_no_attempts() -> None:
    upstreams = Keys(k1=[DEAD_KEY], k2=[DEAD_KEY], k3=[DEAD_KEY])
    targets = [keyed("a", key("k1"), key("k2"), key("k3")), keyed("b", key("l"))]
    one = door(upstreams, router(targets), retry=ONCE)
    await one()
    assert upstreams.names == ["k1", "k2", "k3", "l"]
    assert one.calls[0].attempts == 4


async def test_a_key_is_spared_once_for_each_that_a_target_has() -> None:
    upstreams = Keys(k=[dataclasses.replace(DEAD_KEY, retry_after=1.0)] * 99)
    with pytest.raises(AttemptError):
        await door(upstreams, router([keyed("a", key("k"))]), retry=Retry(max_attempts=3, backoff=FIXED))()
    assert len(upstreams.asked) == 4


# Busy keys


async def test_a_busy_key_is_waited_for_without_polling() -> None:
    upstreams = Keys()
    upstreams.duration = 0.2
    one = door(upstreams, router([keyed("a", key("k", max_concurrent=1))]))
    assert await at_once(one, 20) == pytest.approx(4.0)
    assert [at for _, at in upstreams.asked] == pytest.approx([round(0.2 * n, 6) for n in range(20)])


async def test_places_that_become_free_together_are_all_taken() -> None:
    upstreams = Keys()
    upstreams.duration = 1.0
    one = door(upstreams, router([keyed("a", key("k", max_concurrent=2), key("l", max_concurrent=1))]))
    assert await at_once(one, 12) == pytest.approx(4.0)


async def test_calls_get_a_busy_key_in_the_order_they_came() -> None:
    upstreams = Keys()
    upstreams.duration = 1.0
    one = door(upstreams, router([keyed("a", key("k", max_concurrent=1))]))
    ended: list[int] = []

    async def call(number: int) -> None:
        await anyio.sleep(number / 100)
        await one()
        ended.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(call, number)
    assert ended == list(range(8))


async def test_who_calls_again_at_once_does_not_push_past_those_who_wait() -> None:
    upstreams = Keys()
    upstreams.duration = 1.0
    one = door(upstreams, router([keyed("a", key("k", max_concurrent=1))]))
    done = dict.fromkeys("abc", 0)

    async def worker(name: str) -> None:
        while True:
            await one()
            done[name] += 1

    with anyio.move_on_after(30.5):
        async with anyio.create_task_group() as tasks:
            for name in done:
                tasks.start_soon(worker, name)
    assert done == {"a": 10, "b": 10, "c": 10}


async def test_a_waiter_that_leaves_lets_the_next_one_have_its_turn() -> None:
    routing = router([keyed("a", key("k", max_concurrent=1))])

    async def scenario() -> None:
        upstreams = Keys()
        upstreams.duration = 1.0
        one = door(upstreams, routing)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await anyio.sleep(0.1)
            await one()

    async def check() -> None:
        upstreams = Keys()
        upstreams.duration = 1.0
        assert await at_once(door(upstreams, routing), 3) == pytest.approx(3.0)

    assert await cancel_at_every_await(scenario, check) >= 3


async def test_a_busy_key_is_left_for_another_model_when_patience_ends() -> None:
    upstreams = Keys(k=[30.0])
    routing = router(
        {"m": keyed("a", key("k", max_concurrent=1)), "n": keyed("b", key("l"))},
        fallbacks={"m": "n"},
        patience=3,
    )
    await at_once(door(upstreams, routing), 2)
    assert upstreams.asked == [("k", 0.0), ("l", 3.0)]


async def test_a_busy_key_is_waited_for_up_to_max_wait() -> None:
    upstreams = Keys(k=[30.0])
    one = door(upstreams, router([keyed("a", key("k", max_concurrent=1))], max_wait=5.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.sleep(1)
        with pytest.raises(NoTargetError) as raised:
            await one()
        assert one.calls[-1].wait_time == pytest.approx(5.0)
    assert raised.value.rejected == ("a:credential_busy",)


async def test_a_key_that_is_out_of_requests_is_waited_for_exactly() -> None:
    upstreams = Keys()
    one = door(upstreams, router([keyed("a", key("k", requests_per_minute=6))]))
    await at_once(one, 9)
    assert [at for _, at in upstreams.asked] == pytest.approx([0.0] * 6 + [10.0, 20.0, 30.0])


async def test_a_busy_key_does_not_make_its_target_begin_slowly() -> None:
    upstreams = Keys()
    upstreams.duration = 0.2
    routing = router([keyed("a", key("k", max_concurrent=1))])
    await at_once(door(upstreams, routing), 3)
    deployment = routing._fleet.deployment("a")
    assert deployment is not None
    assert deployment.load.ramp(anyio.current_time()) == 1.0


# Throttled keys


async def test_a_throttled_key_rests_and_another_is_used_at_once() -> None:
    upstreams = Keys(k1=[throttled(30.0)])
    routing = router([keyed("a", key("k1"), key("k2"))])
    one = door(upstreams, routing)
    for _ in range(3):
        await one()
    assert upstreams.asked == [("k1", 0.0), ("k2", 0.0), ("k2", 0.0), ("k2", 0.0)]
    health = routing.health().targets[0]
    assert (health.healthy, health.cooling_down) == (True, 0.0)
    assert [(one.name, one.state, round(one.back_in)) for one in health.credentials] == [
        ("k1", "resting", 30),
        ("k2", "living", 0),
    ]
    await anyio.sleep(30)
    await one()
    assert upstreams.names[-1] == "k1"


async def test_a_target_cools_down_when_all_its_keys_rest() -> None:
    upstreams = Keys(k1=[throttled(30.0)], k2=[throttled(5.0)])
    routing = router([keyed("a", key("k1"), key("k2"))])
    one = door(upstreams, routing, retry=Retry(max_attempts=2, backoff=FIXED))
    with pytest.raises(AttemptError):
        await one()
    assert not routing.health().targets[0].healthy
    assert routing.health().targets[0].cooling_down == pytest.approx(5.0)
    await one()
    assert upstreams.names == ["k1", "k2", "k2"]
    assert 5.0 <= upstreams.asked[-1][1] <= 5.5


# Shared keys


async def test_one_key_of_two_targets_has_one_cap() -> None:
    upstreams = Keys()
    upstreams.duration = 1.0
    shared = key("k", max_concurrent=1)
    one = door(upstreams, router({"m": keyed("a", shared), "n": keyed("b", shared)}))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: one(model="m"))
        tasks.start_soon(lambda: one(model="n"))
    assert upstreams.asked == [("k", 0.0), ("k", 1.0)]


async def test_one_key_of_two_targets_is_dead_for_both_and_throttled_for_one() -> None:
    upstreams = Keys(k=[throttled(9.0), DEAD_KEY])
    shared = key("k")
    routing = router({"m": keyed("a", shared), "n": keyed("b", shared)})
    one = door(upstreams, routing, retry=ONCE)
    with pytest.raises(AttemptError):
        await one(model="m")
    assert [target.healthy for target in routing.health().targets] == [False, True]
    with pytest.raises(AttemptError):
        await one(model="n")
    assert [target.healthy for target in routing.health().targets] == [False, False]
    await anyio.sleep(10)
    with pytest.raises(NoTargetError):
        await one(model="m")


# What is told


async def test_health_tells_of_dead_keys_and_counts_them_as_failures() -> None:
    upstreams = Keys(k=[DEAD_KEY])
    routing = router([keyed("a", key("k"))])
    with pytest.raises(AttemptError):
        await door(upstreams, routing)()
    health = routing.health()
    (told,) = health.targets
    assert (told.healthy, told.attempts, told.failures, health.failures) == (False, 1, 1, 1)
    assert [(one.name, one.state, one.back_in) for one in told.credentials] == [("k", "set_aside", 60.0)]
    assert json.loads(health.to_json())["targets"][0]["credentials"][0]["state"] == "set_aside"


async def test_a_target_is_brought_back_by_hand() -> None:
    upstreams = Keys(k=[DEAD_KEY])
    routing = router([keyed("a", key("k"))])
    one = door(upstreams, routing)
    with pytest.raises(AttemptError):
        await one()
    routing.restore("a")
    assert routing.health().targets[0].healthy
    await one()


async def test_every_target_whose_key_cannot_be_had_is_named() -> None:
    def fails() -> str:
        raise RuntimeError("the vault is sealed")

    sealed = Credential(name="vault", value=fails)
    one = door(Keys(), router([keyed("a", sealed), keyed("b", sealed)]))
    with pytest.raises(NoTargetError, match=r"target 'a'.*target 'b'.*RuntimeError") as raised:
        await one()
    assert raised.value.rejected == ("a:no_credential", "b:no_credential")
    assert isinstance(raised.value.__cause__, RuntimeError)


async def test_a_deadline_bounds_the_wait_for_a_key() -> None:
    upstreams = Keys(k=[30.0])
    one = door(upstreams, router([keyed("a", key("k", max_concurrent=1))]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.sleep(0.1)
        began = anyio.current_time()
        with pytest.raises(DeadlineExceededError):
            await one(deadline=began + 2.0)
        assert anyio.current_time() == pytest.approx(began + 2.0)


async def test_a_failure_of_another_kind_counts_as_before() -> None:
    upstreams = Keys(k=[FAILURE] * 9)
    with pytest.raises(AttemptError):
        await door(
            upstreams, router([keyed("a", key("k"), key("k"))]), retry=Retry(max_attempts=2, backoff=FIXED)
        )()
    assert len(upstreams.asked) == 2


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_comes_and_leaves_no_place_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    shared = key("s", max_concurrent=1)
    routing = router(
        {
            "m": keyed("a", shared, key("k", max_concurrent=2)),
            "n": [keyed("b", shared), keyed("c", key("l", max_concurrent=1))],
        }
    )
    upstreams = Keys(**{name: [rng.choice([0.0, 0.1, 1.0]) or SUCCESS for _ in range(200)] for name in "skl"})
    one = door(upstreams, routing)
    answered = 0

    async def call() -> None:
        nonlocal answered
        await anyio.sleep(rng.choice([0.0, 0.5, 1.0, 1.5]))
        with anyio.move_on_after(rng.choice([0.0, 0.3, 1.0, 100.0, 100.0])):
            await one(model=rng.choice("mn"))
            answered += 1

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(call)
    assert anyio.current_time() - began < 60
    assert 40 <= answered <= 100
    assert [told.in_flight for told in routing.health().targets] == [0, 0, 0]
