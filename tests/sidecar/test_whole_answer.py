"""A reply that is at hand is written by one call, and nobody can tell it from one that was sent in parts."""

from __future__ import annotations

import asyncio
import json

import anyio.lowlevel
import pytest
import uvicorn
from uvicorn.server import ServerState

from resilient_llm.message import Headers, Reply, Request
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.cycle import Cycle
from resilient_llm.sidecar.protocol import guarded
from resilient_llm.sidecar.watched import WatchedProtocol
from resilient_llm.streams import BufferedStream
from resilient_llm.testing import FakeProvider
from tests.sidecar.support import ASK, OPEN, MemoryEngine, logged
from tests.sidecar.wire import Wire

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

ANSWER = b'{"object": "chat.completion", "choices": []}'
ASKING = json.dumps(ASK).encode()


@pytest.fixture(params=["at once", "in parts"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tell whether the server takes whole answers; either way a client must be served the same."""
    if request.param == "in parts":
        monkeypatch.setattr(WatchedProtocol, "answer", lambda *_: False)
    return bool(request.param == "at once")


class Held(MemoryEngine):
    """Answer from memory, as soon as that is allowed."""

    def __init__(self) -> None:
        super().__init__(FakeProvider())
        self.headers: Headers = [
            (b"date", b"Mon, 30 Nov 2026 12:00:00 GMT"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(ANSWER)),
        ]
        self.allowed = asyncio.Event()

    async def __call__(self, request: Request) -> Reply:
        self.sent.append(request)
        await self.allowed.wait()
        return Reply(200, self.headers, BufferedStream([ANSWER]), native=None)


class Served:
    """A sidecar behind its own protocol, on a connection in memory."""

    def __init__(self) -> None:
        self.engine, self.wire = Held(), Wire()
        settings = uvicorn.Config(Sidecar(parse(OPEN), self.engine), log_config=None, access_log=False)
        settings.load()
        self.protocol = guarded(max_head=65_536, head_timeout=10.0)(settings, ServerState(), {})
        self.protocol.connection_made(self.wire)

    def ask(
        self, *, version: str = "1.1", more: bytes = b"", number: int = 1, method: bytes = b"POST"
    ) -> None:
        """Send a request; of each the id is its number."""
        head = b"POST /v1/chat/completions HTTP/%b\r\nhost: localhost\r\n" % version.encode()
        own = b"x-request-id: %d\r\ncontent-length: %d\r\n" % (number, len(ASKING))
        self.protocol.data_received(head + own + more + b"\r\n" + ASKING)

    async def settle(self) -> None:
        """Let everything happen that can."""
        await anyio.wait_all_tasks_blocked()
        await anyio.lowlevel.checkpoint()  # tasks that have ended say so in the next turn


def answer(number: int = 1, *, more: bytes = b"", sized: bool = True) -> bytes:
    head = b"date: Mon, 30 Nov 2026 12:00:00 GMT\r\ncontent-type: application/json\r\n"
    size = b"content-length: %d\r\n" % len(ANSWER) if sized else b""
    own = b"x-resilient-llm-target: main\r\nx-resilient-llm-request-id: %d\r\n" % number
    body = ANSWER if sized else b"%x\r\n%b\r\n0\r\n\r\n" % (len(ANSWER), ANSWER)
    return b"HTTP/1.1 200 OK\r\n" + head + size + own + more + b"\r\n" + body


async def test_it_is_one_write(at_once: bool) -> None:
    served = Served()
    served.engine.allowed.set()
    with logged() as log:
        served.ask()
        await served.settle()
        assert served.wire.writes == [answer()], at_once
        assert (await log.entry())["outcome"] == "ok"
    assert not served.wire.closed
    assert not served.protocol.tasks


async def test_no_message_is_sent_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cycle, "send", None)
    served = Served()
    served.engine.allowed.set()
    served.ask()
    await served.settle()
    assert served.wire.writes == [answer()]


async def test_one_without_a_length_is_sent_as_one_chunk(at_once: bool) -> None:
    served = Served()
    served.engine.headers.pop()
    served.engine.allowed.set()
    served.ask()
    await served.settle()
    assert served.wire.writes == [answer(more=b"transfer-encoding: chunked\r\n", sized=False)], at_once


async def test_requests_in_line_are_answered_in_their_order(at_once: bool) -> None:
    served = Served()
    for number in (1, 2, 3):
        served.ask(number=number)
    await served.settle()
    assert not served.wire.writes
    assert len(served.engine.sent) == 1
    served.engine.allowed.set()
    await served.settle()
    assert served.wire.writes == [answer(1), answer(2), answer(3)], at_once


@pytest.mark.parametrize(
    ("version", "more"),
    [("1.0", b""), ("1.1", b"connection: close\r\n"), ("1.1", b"expect: 100-continue\r\n")],
)
async def test_who_asks_in_another_way_is_answered_in_it(version: str, more: bytes, at_once: bool) -> None:
    served = Served()
    served.engine.allowed.set()
    served.ask(version=version, more=more)
    await served.settle()
    ends = b"expect" not in more
    written = b"".join(served.wire.writes).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert written == answer(more=b"connection: close\r\n" * ends), at_once
    assert served.wire.closed is ends


async def test_the_last_answer_of_a_server_that_stops_ends_the_connection(at_once: bool) -> None:
    served = Served()
    served.ask()
    await served.settle()
    served.protocol.shutdown()
    served.engine.allowed.set()
    await served.settle()
    assert b"".join(served.wire.writes) == answer(more=b"connection: close\r\n"), at_once
    assert served.wire.closed


async def test_a_client_that_takes_nothing_for_now_is_waited_for(at_once: bool) -> None:
    served = Served()
    served.protocol.pause_writing()
    served.engine.allowed.set()
    served.ask()
    await served.settle()
    assert not served.wire.writes
    served.protocol.resume_writing()
    await served.settle()
    assert served.wire.writes == [answer()], at_once


@pytest.mark.parametrize(
    ("closes", "resumes", "ends", "outcome"),
    [
        (False, True, False, "ok"),
        (False, False, True, "cancelled"),
        (True, True, True, "ok"),
        (True, False, True, "cancelled"),
        (True, False, ConnectionResetError(), "cancelled"),
    ],
    ids=["it is taken", "it is left", "it is the last", "the last is left", "the last is broken off"],
)
async def test_an_answer_is_over_when_the_client_has_taken_it(  # noqa: PLR0917 - fixtures among them
    closes: bool,
    resumes: bool,
    ends: bool | Exception,
    outcome: str,
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served()
    write = served.wire.write

    def writing(data: bytes) -> None:
        write(data)
        served.protocol.pause_writing()

    monkeypatch.setattr(served.wire, "write", writing)
    served.engine.allowed.set()
    with logged() as log:
        served.ask(more=b"connection: close\r\n" if closes else b"")
        await served.settle()
        assert len(served.wire.writes) == 1, at_once
        assert not log.entries
        if resumes:
            served.protocol.resume_writing()
        if ends:
            served.wire.close()
            served.protocol.connection_lost(ends if isinstance(ends, Exception) else None)
        await served.settle()
        entry = await log.entry()
    assert (entry["status"], entry["outcome"]) == (200, outcome)
    assert not served.protocol.tasks


@pytest.mark.parametrize("paused", [True, False])
async def test_a_client_that_leaves_is_sent_nothing(paused: bool, at_once: bool) -> None:
    served = Served()
    with logged() as log:
        if paused:
            served.protocol.pause_writing()
            served.engine.allowed.set()
        served.ask()
        await served.settle()
        served.wire.close()
        served.protocol.connection_lost(None)
        served.engine.allowed.set()
        await served.settle()
        assert not served.wire.writes, at_once
        assert (await log.entry())["outcome"] == ("ok" if paused else "cancelled")
    assert not served.protocol.tasks


async def test_one_that_may_not_be_sent_ends_the_connection_and_is_a_defect(at_once: bool) -> None:
    served = Served()
    served.engine.headers[-1] = (b"content-length", b"%d" % (len(ANSWER) - 1))
    served.engine.allowed.set()
    with logged() as log:
        served.ask()
        await served.settle()
        assert not served.wire.writes, at_once
        assert served.wire.closed
        entry = await log.entry()
    assert entry["error"] == "internal_error"
