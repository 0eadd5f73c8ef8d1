"""The total deadline: what it covers, who may shorten it."""

from __future__ import annotations

import contextlib
import math

import anyio
import pytest

from resilient_llm import ConfigurationError, Deadline, DeadlineExceededError
from resilient_llm.policies.deadline import read_seconds
from tests.support import Door, Provider, cancel_at_every_await

pytestmark = pytest.mark.anyio


async def test_ends_a_call_that_takes_longer() -> None:
    door = Door(Deadline(5), provider=Provider(60.0))
    started = anyio.current_time()
    with pytest.raises(DeadlineExceededError, match="5 s after it began"):
        await door()
    assert anyio.current_time() - started == pytest.approx(5)
    outcome = door.calls[0].outcome
    assert outcome is not None
    assert outcome.error_type == "deadline_exceeded"


async def test_says_of_a_deadline_that_has_passed_already_that_there_was_no_time() -> None:
    provider = Provider()
    with pytest.raises(DeadlineExceededError, match=", 0 s after it began"):
        await Door(Deadline(5), provider=provider)(deadline=anyio.current_time() - 1)
    assert not provider.attempts


async def test_leaves_a_call_alone_that_is_done_in_time() -> None:
    assert (await Door(Deadline(5), provider=Provider(4.9))()).status == 200


async def test_each_of_many_calls_ends_at_its_own_deadline() -> None:
    policy = Deadline(5)
    began = anyio.current_time()
    ended: dict[int, float] = {}

    async def call(number: int, duration: float) -> None:
        with contextlib.suppress(DeadlineExceededError):
            await Door(policy, provider=Provider(duration))()
        ended[number] = anyio.current_time() - began

    async with anyio.create_task_group() as tasks:
        for number, duration in enumerate((1.0, 60.0, 2.0, 60.0, 4.5)):
            tasks.start_soon(call, number, duration)
            await anyio.sleep(1)
    assert ended == pytest.approx({0: 1, 1: 1 + 5, 2: 2 + 2, 3: 3 + 5, 4: 4 + 4.5})


def test_a_deadline_serves_one_event_loop_after_another() -> None:
    policy = Deadline(0.05)

    async def call() -> None:
        with pytest.raises(DeadlineExceededError):
            await Door(policy, provider=Provider(60.0))()

    for backend in ("asyncio", "trio", "asyncio"):
        anyio.run(call, backend=backend)


async def test_an_inherited_deadline_can_only_shorten() -> None:
    now = anyio.current_time()
    door = Door(Deadline(5), provider=Provider(60.0, 60.0))
    with pytest.raises(DeadlineExceededError):
        await door(deadline=now + 2)
    assert anyio.current_time() - now == pytest.approx(2)
    with pytest.raises(DeadlineExceededError):
        await door(deadline=math.inf)
    assert anyio.current_time() - now == pytest.approx(7)


async def test_the_callers_cancellation_stays_a_cancellation() -> None:
    door = Door(Deadline(5), provider=Provider(60.0))
    with anyio.move_on_after(2) as scope:
        await door()
    assert scope.cancelled_caught
    outcome = door.calls[0].outcome
    assert outcome is not None
    assert outcome.error_type == "cancelled"


async def test_cancellation_at_every_await_finishes_the_call() -> None:
    door = Door(Deadline(5), provider=Provider(duration=1.0))

    async def scenario() -> None:
        await door()

    async def check() -> None:
        assert all(call.finished for call in door.calls)

    assert await cancel_at_every_await(scenario, check) >= 1


@pytest.mark.parametrize("total", [0, -1, math.inf, math.nan, "5", True])
async def test_totals_that_cannot_work_are_refused(total: float) -> None:
    with pytest.raises(ConfigurationError, match="total="):
        Deadline(total)


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("2.5", 2.5),
        (" 2 ", 2),
        ("2.", 2),
        (".5", 0.5),
        ("5e-1", 0.5),
        ("1E+0", 1),
        (str(0.1 + 0.2), 0.1 + 0.2),
        (repr(1 / 3), 1 / 3),
        ("0", 0),
        ("1e400", math.inf),
        ("9" * 64, float("9" * 64)),
        *(
            (wrong, None)
            for wrong in ("9" * 65, "", ".", "-1", "+1", "nan", "inf", "1_0", "0x1", "1,5", "1 s")
        ),
        ("\u0662", None),
    ],
)
def test_a_header_holds_seconds_as_any_language_writes_them(asked: str, seconds: float | None) -> None:
    assert read_seconds(asked.encode()) == seconds
