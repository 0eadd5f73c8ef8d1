"""A call and its attempts, by themselves."""

from __future__ import annotations

from functools import partial
from threading import Thread

import anyio
import pytest

from resilient_llm import CallNext, Profile, Reply, Request, Retry, Target
from resilient_llm._loop import EventLoop
from resilient_llm.call import Call
from resilient_llm.outcome import SUCCESS, Outcome
from resilient_llm.telemetry.silent import SILENT
from tests.support import Door, Provider

pytestmark = pytest.mark.anyio

HOME, AWAY = Target(name="home"), Target(name="away", model="other")
ASKED = Request("POST", "http://h/v1", [])


def begun(read: list[Request]) -> Call:
    """Begin a call that notes what its profile is read from."""

    def profile(request: Request) -> Profile:
        read.append(request)
        return Profile(model="m")

    loop = EventLoop.current()
    return Call(ASKED, profile, HOME, loop, SILENT, loop.time())


async def test_what_is_asked_is_read_once_for_a_call_and_its_attempts() -> None:
    read: list[Request] = []
    call = begun(read)
    first, second = call.attempt(reason="initial"), call.attempt(reason="retry")
    assert first.profile is second.profile is call.profile
    assert read == [ASKED]


async def test_an_attempt_at_something_else_is_read_by_itself() -> None:
    read: list[Request] = []
    other = ASKED.replace(body=b"{}")
    attempt = begun(read).attempt(reason="initial", request=other)
    assert attempt.profile.model == "m"
    assert read == [other]


async def test_what_is_taken_back_is_undone_as_it_was_sent() -> None:
    call = begun([])
    seen: list[tuple[str, str | None]] = []

    def note(_outcome: Outcome, *, name: str) -> None:
        seen.append((call.target.name, name))

    call.on_finish(partial(note, name="kept"))
    mark = call.mark()
    call.on_finish(partial(note, name="taken back"))
    call.direct(AWAY, ASKED.replace(url="http://away/v1"))
    call.taken += (object(),)
    await call.retract(mark)
    assert seen == [("away", "taken back")]
    assert (call.target, call.request, call.taken, call.model) == (HOME, ASKED, (), "m")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("elsewhere", [True, False], ids=["another thread", "the loop's thread"])
def test_what_outlives_its_event_loop_is_undone_all_the_same(backend: str, elsewhere: bool) -> None:
    async def begin() -> Call:
        return begun([])

    call = anyio.run(begin, backend=backend)
    undone: list[Outcome] = []
    call.on_finish(undone.append)
    thread = Thread(target=call.finish, args=[SUCCESS])
    if elsewhere:
        thread.start()
        thread.join()
    else:
        call.finish(SUCCESS)
    assert call.finished
    assert undone == [SUCCESS]


async def test_callbacks_know_when_they_are_run() -> None:
    call = begun([])
    noted: list[float] = []
    call.on_finish(lambda _: noted.append(call.ended))
    mark = call.mark()
    call.on_finish(lambda _: noted.append(call.ended))
    began = anyio.current_time()
    await anyio.sleep(1)
    await call.retract(mark)
    await anyio.sleep(1)
    call.finish(SUCCESS)
    await anyio.sleep(1)
    call.on_finish(lambda _: noted.append(call.ended))
    assert noted == pytest.approx([began + 1, began + 2, began + 3])


async def test_what_callbacks_leave_to_await_is_awaited_before_a_whole_reply_is_given() -> None:
    settled: list[bool] = []

    async def policy(call: Call, call_next: CallNext) -> Reply:
        async def settle() -> None:
            await anyio.sleep(1)
            settled.append(call.parent is None)

        call.on_finish(lambda _: settle())
        return await call_next(call)

    await Door(policy, Retry(), policy, provider=Provider())()
    assert sorted(settled) == [False, True]


async def test_what_callbacks_leave_to_await_has_five_seconds_together() -> None:
    settled: list[str] = []

    async def settle(_outcome: Outcome, *, name: str, seconds: float) -> None:
        await anyio.sleep(seconds)
        settled.append(name)

    async def policy(call: Call, call_next: CallNext) -> Reply:
        for name, seconds in (("never", 60.0), ("quick", 0.1), ("never", 60.0), ("slow", 4.0)):
            call.on_finish(partial(settle, name=name, seconds=seconds))
        return await call_next(call)

    began = anyio.current_time()
    await Door(policy, provider=Provider())()
    assert settled == ["quick", "slow"]  # whoever takes too long takes nothing of the others' time
    assert anyio.current_time() - began == pytest.approx(5)


async def test_what_is_left_to_await_by_an_end_that_was_held_up_is_awaited_all_the_same() -> None:
    settled: list[Outcome] = []

    async def settle(outcome: Outcome) -> None:
        await anyio.sleep(1)
        settled.append(outcome)

    call = begun([])
    call.on_finish(settle)
    release = call.keep_open()
    call.finish(SUCCESS)  # by whoever owns it, and leaves
    await anyio.sleep(1)
    assert not call.finished
    release()
    await anyio.sleep(2)
    assert settled == [SUCCESS]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_is_left_to_await_when_the_loop_has_ended_is_let_go(backend: str) -> None:
    async def settle(_outcome: Outcome) -> None:
        raise AssertionError

    async def begin() -> Call:
        call = begun([])
        call.on_finish(settle)
        return call

    call = anyio.run(begin, backend=backend)
    call.finish_alone(SUCCESS)  # a warning that nobody has awaited it would be an error
    assert call.finished
    assert not call.unsettled
