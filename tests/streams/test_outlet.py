"""Events that go out while who waits for them sleeps on: the same bytes, and the same end, as by waking up for each."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import product
from typing import Any

import anyio
import pytest

from resilient_llm import AttemptTimeout, Deadline, Outcome, Policy, Stream
from resilient_llm.client import ClientDoor
from resilient_llm.event_stream import EventStream
from resilient_llm.message import Reply, Request
from resilient_llm.transports.http1 import Http1Transport
from resilient_llm.transports.http1_connection import Connection
from resilient_llm.transports.http1_incoming import Body
from resilient_llm.transports.http1_pool import Pool
from resilient_llm.transports.http1_request import Origin
from tests.streams.scripted import ASK, DONE, OVERLOADED, PING, ROLE, URL, Spy, data, says, usage

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
WHOLE = ROLE + says("Hello ") + says("wor") + says("ld", "stop") + usage(3, 4) + DONE


class Caller:
    """Where events go; `full` when it takes none for now."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.full = False

    def is_ready(self) -> bool:
        return not self.full

    def put(self, data: bytes) -> None:
        self.received.append(data)


class Upstream:
    """A provider's side of one connection of the engine's, without a socket."""

    errors = Http1Transport.errors

    def __init__(self) -> None:
        self.connection = self._connect()

    def _connect(self) -> Connection:
        pool = Pool(asyncio.get_running_loop(), 60.0)
        self.connection = pool.new(Origin(False, "h.example", 80))
        return self.connection

    async def __call__(self, request: Request) -> Reply:
        incoming = self.connection.expect(bodiless=False)
        self.connection.send(b"")
        self.connection.data_received(HEAD)
        body = Body(incoming)
        return Reply(incoming.status, incoming.headers, body, native=body)

    def say(self, *parts: bytes) -> None:
        self.connection.data_received(b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts]))


class Exchange:
    """One call, whose reply is passed on as the sidecar does it."""

    def __init__(self, *policies: Policy, outlet: bool = True) -> None:
        self.upstream, self.caller, self.spy = Upstream(), Caller(), Spy()
        engine = Http1Transport()
        self._door = ClientDoor(
            self.upstream,
            synthesise=engine.synthesise,
            errors=engine.errors,
            policies=[*policies, self.spy],
        )
        self._outlet = outlet
        self.error: Exception | None = None
        self.ended = False

    @property
    def outcome(self) -> Outcome:
        (ended,) = self.spy.ended
        return ended

    async def begin(self) -> EventStream:
        request = Request("POST", URL, [(b"content-type", b"application/json")], ASK_BODY)
        stream = (await self._door.handle(request)).stream
        assert isinstance(stream, EventStream)
        if self._outlet:
            stream.put_into(self.caller)
        return stream

    async def relay(self, stream: EventStream) -> None:
        try:
            async for chunk in stream:
                if chunk:
                    self.caller.received.append(chunk)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        finally:
            await stream.aclose()
            self.ended = True


ASK_BODY = data(ASK).removeprefix(b"data: ").rstrip()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_events_go_out_at_once_and_nobody_wakes_up_for_them() -> None:
    it = Exchange()
    stream = await it.begin()
    woken: list[bytes] = []

    async def relay() -> None:
        woken.extend([chunk async for chunk in stream])

    reader = asyncio.create_task(relay())
    await turn()
    it.upstream.say(ROLE)
    it.upstream.say(says("first"))  # they wake up, who have to note when that was
    await turn()
    for event in (says("one"), says("two"), PING):
        it.upstream.say(event)
        assert it.caller.received[-1] == event
    await turn()
    it.upstream.say(says("three", "stop"), DONE)  # read together, put together
    assert it.caller.received[-1] == says("three", "stop") + DONE
    it.upstream.connection.data_received(LAST)
    await reader
    assert woken == [ROLE + says("first")]
    assert it.outcome.ok
    assert stream.attempt.first_chunk is not None


async def test_a_caller_who_takes_no_more_is_waited_for_and_nothing_overtakes() -> None:
    it = Exchange()
    stream = await it.begin()
    sent = [says(f"{number}") for number in range(30)]
    reader = asyncio.create_task(it.relay(stream))
    await turn()
    for number, event in enumerate(sent):
        it.caller.full = number % 4 in (1, 2)
        it.upstream.say(event)
        if number % 3 == 0:
            await turn()
    it.upstream.say(says("", "stop"), DONE)
    it.upstream.connection.data_received(LAST)
    await reader
    assert b"".join(it.caller.received) == b"".join(sent) + says("", "stop") + DONE
    assert it.outcome.ok


ENDS: dict[str, tuple[bytes, bool]] = {
    "whole": (WHOLE, True),
    "broken off": (ROLE + says("one") + says("two"), False),
    "ended too early": (ROLE + says("one") + says("two"), True),
    "in the midst of an event": (ROLE + says("one") + b'data: {"choices', False),
    "an error": (ROLE + says("one") + OVERLOADED + says("two"), True),
    "an error at first": (OVERLOADED, True),
    "no answer": (ROLE.replace(b"content", b"contents") + DONE, True),
    "nothing": (b"", True),
    "malformed": (ROLE + says("one") + data("{oops") + says("two", "stop") + DONE, True),
    "no blank line": (WHOLE[:-1], True),
    "after the end": (WHOLE + says("more"), True),
    "too large": (ROLE + says("x" * 3000) + says("two", "stop") + DONE, True),
}


@pytest.mark.parametrize(("sent", "ends"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("options", [{}, {"malformed": "skip"}, {"include_usage": True}], ids=str)
async def test_it_is_the_same_as_waking_up_for_each(sent: bytes, ends: bool, options: dict[str, Any]) -> None:
    for size, at_once in product((1, 7, 60, 150, 400, 10_000), (1, 3)):
        parts = [sent[at : at + size] for at in range(0, len(sent), size)]
        found = []
        for outlet in (False, True):
            it = Exchange(Stream(max_event_size=2048, **options), outlet=outlet)
            reader = asyncio.create_task(it.relay(await it.begin()))
            await turn()
            for number, part in enumerate(parts):
                if not it.ended and it.upstream.connection.closed is False:
                    it.upstream.say(part)
                    if number % at_once == 0:
                        await turn()
            if not it.upstream.connection.closed:
                if ends:
                    it.upstream.connection.data_received(LAST)
                else:
                    it.upstream.connection.eof_received()
            await reader
            # What is read together with an error, and comes after it, is counted and not passed on.
            outcome = it.outcome if at_once == 1 else replace(it.outcome, usage=None)
            found.append((b"".join(it.caller.received), outcome, type(it.error), str(it.error)))
        assert found[0] == found[1], (size, at_once)


@pytest.mark.parametrize("clocks", [[], [AttemptTimeout(content_gap=8)]], ids=["none", "gap"])
async def test_a_deadline_passes_also_where_nobody_has_woken_up_since(clocks: list[Policy]) -> None:
    it = Exchange(Deadline(10), *clocks)
    stream = await it.begin()
    reader = asyncio.create_task(it.relay(stream))
    for number in range(30):
        await anyio.sleep(1)
        if it.ended:
            break
        it.upstream.say(says(str(number)))
    await reader
    assert number == pytest.approx(10, abs=1)
    assert it.upstream.connection.closed
    assert it.outcome.error_type == "deadline_exceeded"
    told = b"".join(it.caller.received)
    assert b"deadline_exceeded" in told.removeprefix(b"".join(map(says, map(str, range(9)))))


@pytest.mark.parametrize(("outlet", "full"), [(False, False), (True, False), (True, True)])
async def test_a_clock_goes_on_from_each_piece_of_content_and_not_from_pings(
    outlet: bool, full: bool
) -> None:
    it = Exchange(AttemptTimeout(content_gap=10), outlet=outlet)
    reader = asyncio.create_task(it.relay(await it.begin()))
    for number in range(8):
        await anyio.sleep(6)
        it.upstream.say(says(str(number)))
        await anyio.sleep(3)
        it.caller.full = full  # who waits for pings has waited for content meanwhile
        it.upstream.say(PING)
        it.caller.full = False
    began = anyio.current_time()
    await reader
    assert anyio.current_time() - began == pytest.approx(7)
    assert it.outcome.error_type == "content_gap_timeout"
    assert b"content_gap_timeout" in it.caller.received[-1]


async def test_an_error_that_comes_just_before_it_is_too_late_is_told() -> None:
    it = Exchange(AttemptTimeout(content_gap=10))
    loop = asyncio.get_running_loop()
    # The loop finds out about both at once, and nobody has a turn between them.
    loop.call_at(loop.time() + 10, it.upstream.say, PING + OVERLOADED)
    reader = asyncio.create_task(it.relay(await it.begin()))
    await turn()
    it.upstream.say(says("one"))
    await reader
    assert it.outcome.error_type == "overloaded"
    assert b"".join(it.caller.received) == says("one") + PING + OVERLOADED


async def test_who_is_cancelled_just_after_an_error_came_stays_so() -> None:
    it = Exchange()
    reader = asyncio.create_task(it.relay(await it.begin()))
    await turn()
    it.upstream.say(says("one"))
    await turn()
    it.upstream.say(OVERLOADED)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert it.caller.received == [says("one")]
    assert it.upstream.connection.closed


@pytest.mark.parametrize("told", [OVERLOADED, PING + OVERLOADED, data("x" * 3000)[:-1], DONE])
async def test_a_stream_that_has_failed_ends_at_once_whatever_else_would_come(told: bytes) -> None:
    it = Exchange(Stream(max_event_size=2048))
    reader = asyncio.create_task(it.relay(await it.begin()))
    await turn()
    it.upstream.say(says("one"))
    await turn()
    it.upstream.say(told)
    await turn()
    assert it.upstream.connection.closed is (told != DONE), "which is an end, and no failure"
    reader.cancel()
    await asyncio.wait([reader])


async def _cancel(it: Exchange, stream: EventStream, reader: asyncio.Task[None]) -> None:
    reader.cancel()


async def _close(it: Exchange, stream: EventStream, reader: asyncio.Task[None]) -> None:
    await stream.aclose()


@pytest.mark.parametrize("leave", [_cancel, _close])
async def test_nothing_goes_out_once_it_was_given_up(leave: Callable[..., Coroutine[Any, Any, None]]) -> None:
    it = Exchange()
    stream = await it.begin()
    reader = asyncio.create_task(it.relay(stream))
    it.upstream.say(says("first"))
    await turn()
    it.upstream.say(says("one"))
    leaving = asyncio.create_task(leave(it, stream, reader))
    await asyncio.sleep(0)  # nobody who waits has had a turn yet
    if not it.upstream.connection.closed:
        it.upstream.say(says("two"))
    await leaving
    await asyncio.wait([reader])
    assert it.caller.received == [says("first"), says("one")]
    assert it.upstream.connection.closed
    assert it.outcome.error_type == "cancelled"


async def test_a_stream_that_is_forgotten_closes_its_connection() -> None:
    it = Exchange()
    stream = await it.begin()
    it.upstream.say(says("first"))
    assert await anext(stream) == says("first")
    reader = asyncio.create_task(anext(stream))
    await turn()
    it.upstream.say(says("one"))
    assert it.caller.received == [says("one")]
    it.caller.full = True
    it.upstream.say(says("two"))
    assert await reader == says("two")
    gc.disable()
    try:
        del stream, reader
        await turn()
        assert it.upstream.connection.closed, "without the help of the garbage collector"
    finally:
        gc.enable()
    assert it.outcome.error_type == "cancelled"


async def test_a_defect_of_the_caller_ends_the_stream_and_hangs_nobody() -> None:
    it = Exchange()
    stream = await it.begin()

    def broken(data: bytes) -> None:
        raise RuntimeError("gone")

    it.caller.put = broken  # type: ignore[method-assign]
    reader = asyncio.create_task(it.relay(stream))
    it.upstream.say(says("first"))
    await turn()
    with pytest.raises(RuntimeError, match="gone") as raised:
        it.upstream.say(says("one"))
    it.upstream.connection.connection_lost(raised.value)  # as event loops do
    await reader
    assert not it.outcome.ok


@pytest.mark.parametrize("clocks", [[], [AttemptTimeout(content_gap=30)]], ids=["no clocks", "clocks"])
async def test_one_that_has_said_its_last_word_and_stays_is_ended(clocks: list[Policy]) -> None:
    it = Exchange(*clocks)
    reader = asyncio.create_task(it.relay(await it.begin()))
    await turn()
    it.upstream.say(ROLE + says("one"))
    await turn()
    began = anyio.current_time()
    it.upstream.say(says("two", "stop"))
    it.upstream.say(DONE)
    for _ in range(2):
        await anyio.sleep(0.4)
        it.upstream.say(PING)  # which puts it off no more
    await reader
    assert anyio.current_time() - began == pytest.approx(1)
    assert b"".join(it.caller.received) == ROLE + says("one") + says("two", "stop") + DONE + PING * 2
    assert it.outcome.ok
    assert it.upstream.connection.closed
