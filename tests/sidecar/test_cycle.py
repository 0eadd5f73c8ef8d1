"""How a response is written to the socket: its head with the body where that comes at once, else by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from resilient_llm.sidecar.cycle import Cycle

pytestmark = pytest.mark.anyio

HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"5")]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Wire(asyncio.Transport):
    """Note each write by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def cycle_on(
    wire: Wire, *, method: str = "GET", ended: list[str] | None = None, expects: bool = False
) -> Cycle:
    logger = logging.getLogger("tests.cycle")
    cycle = Cycle(
        scope={"type": "http", "method": method},  # type: ignore[typeddict-item]  # nothing else is looked at
        transport=wire,
        flow=FlowControl(wire),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=expects,
        keep_alive=True,
        on_response=lambda: None if ended is None else ended.append("ended"),
    )
    cycle.loop = asyncio.get_running_loop()
    return cycle


def start(headers: list[tuple[bytes, bytes]] = HEADERS, status: int = 200) -> Any:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool = False) -> Any:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_a_head_goes_out_with_the_body_that_comes_at_once() -> None:
    wire, ended = Wire(), list[str]()
    cycle = cycle_on(wire, ended=ended)
    await cycle.send(start())
    await cycle.send(body(b"hello"))
    assert wire.writes == [HEAD + b"hello"]
    assert ended == ["ended"]
    await asyncio.sleep(0)
    assert wire.writes == [HEAD + b"hello"], "and not once more"


async def test_a_head_waits_for_no_body() -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    await cycle.send(start())
    await asyncio.sleep(0)
    assert wire.writes == [HEAD]
    await cycle.send(body(b"hello"))
    assert wire.writes == [HEAD, b"hello"]


async def test_pieces_of_a_chunked_body_are_written_as_they_come() -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    await cycle.send(start([]))
    await cycle.send(body(b"one", more=True))
    await cycle.send(body(b"three", more=True))
    await cycle.send(body(b""))
    assert wire.writes == [CHUNKED + b"3\r\none\r\n", b"5\r\nthree\r\n", b"0\r\n\r\n"]
    assert cycle.response_complete


async def test_the_answer_to_head_has_none_of_the_body() -> None:
    wire = Wire()
    cycle = cycle_on(wire, method="HEAD")
    await cycle.send(start())
    await cycle.send(body(b"hello"))
    assert wire.writes == [HEAD]
    assert cycle.response_complete


async def test_a_head_is_not_written_to_a_connection_that_is_closed_meanwhile() -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    await cycle.send(start())
    wire.close()
    await asyncio.sleep(0)
    assert not wire.writes


async def test_whoever_is_gone_is_sent_nothing() -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    cycle.disconnected = True
    await cycle.send(start())
    await cycle.send(start())
    await asyncio.sleep(0)
    assert not wire.writes


async def test_heads_with_the_same_names_have_values_of_their_own() -> None:
    for value in (b"1", b"2", b"3"):
        wire = Wire()
        await cycle_on(wire).send(start([(b"X-%s", value), (b"Content-Length", b"0")], 204))
        await asyncio.sleep(0)
        assert wire.writes == [b"HTTP/1.1 204 No Content\r\nx-%%s: %b\r\ncontent-length: 0\r\n\r\n" % value]


async def test_a_body_that_is_at_hand_is_given_once_and_then_the_end_is_awaited() -> None:
    cycle = cycle_on(Wire())
    cycle.body, cycle.more_body = bytearray(b"hello"), False
    cycle.message_event.set()
    assert await cycle.receive() == {"type": "http.request", "body": b"hello", "more_body": False}
    waiting = asyncio.ensure_future(cycle.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    cycle.disconnected = True
    cycle.message_event.set()
    assert await waiting == {"type": "http.disconnect"}


@pytest.mark.parametrize("expects", [False, True])
async def test_a_body_that_comes_later_is_given_once_too(expects: bool) -> None:
    wire = Wire()
    cycle = cycle_on(wire, expects=expects)
    waiting = asyncio.ensure_future(cycle.receive())
    await asyncio.sleep(0)
    assert wire.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"] * expects
    cycle.body, cycle.more_body = bytearray(b"hello"), False
    cycle.message_event.set()
    assert await waiting == {"type": "http.request", "body": b"hello", "more_body": False}
    waiting = asyncio.ensure_future(cycle.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    await cycle.send(start())
    await cycle.send(body(b"hello"))
    assert await waiting == {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([body(b"")], "Expected ASGI message 'http.response.start'"),
        ([start(), {"type": "http.response.trailers"}], "Expected ASGI message 'http.response.body'"),
        ([start(), start()], "Expected ASGI message 'http.response.body'"),
        ([start(), body(b"hello!")], "longer than Content-Length"),
        ([start(), body(b"hell")], "shorter than Content-Length"),
        ([start(), body(b"hello"), body(b"")], "after response already completed"),
        ([start([(b"a b", b"")])], "Invalid HTTP header name"),
        ([start([(b"a", b"b\r\nc: d")])], "Invalid HTTP header value"),
    ],
)
async def test_what_may_not_be_sent_is_refused(messages: list[Any], words: str) -> None:
    cycle = cycle_on(Wire())
    *before, last = messages
    for message in before:
        await cycle.send(message)
    with pytest.raises(RuntimeError, match=words):
        await cycle.send(last)


@pytest.mark.parametrize(
    ("method", "headers", "written"),
    [
        ("GET", HEADERS, HEAD + b"hello"),
        ("HEAD", HEADERS, HEAD),
        ("GET", [], CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"),
    ],
)
async def test_a_whole_answer_is_written_at_once(
    method: str, headers: list[tuple[bytes, bytes]], written: bytes
) -> None:
    wire, ended = Wire(), list[str]()
    cycle = cycle_on(wire, method=method, ended=ended)
    assert cycle.answer(200, headers, b"hello")
    assert wire.writes == [written]
    assert ended == ["ended"]
    assert cycle.response_complete
    await asyncio.sleep(0)
    assert wire.writes == [written], "and not once more"
    with pytest.raises(RuntimeError, match="after response already completed"):
        await cycle.send(body(b""))


async def test_a_whole_answer_has_what_the_server_adds_to_each() -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    cycle.default_headers = [(b"server", b"here")]
    assert cycle.answer(200, HEADERS, b"hello")
    assert wire.writes == [HEAD.replace(b"\r\n", b"\r\nserver: here\r\n", 1) + b"hello"]


@pytest.mark.parametrize("obstacle", ["paused", "gone", "begun", "closing"])
async def test_where_anything_is_in_the_way_of_an_answer_none_of_it_is_sent(obstacle: str) -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    cycle.flow.write_paused = obstacle == "paused"
    cycle.disconnected = obstacle == "gone"
    cycle.response_started = obstacle == "begun"
    cycle.keep_alive = obstacle != "closing"
    assert not cycle.answer(200, HEADERS, b"hello")
    await asyncio.sleep(0)
    assert not wire.writes
    assert cycle.response_started is (obstacle == "begun")
    assert not cycle.response_complete


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([(b"content-length", b"6")], "shorter than Content-Length"),
        ([(b"content-length", b"4")], "longer than Content-Length"),
        ([(b"a b", b"")], "Invalid HTTP header name"),
        ([(b"a", b"b\r\nc: d")], "Invalid HTTP header value"),
        ([(b"a", b"\x7f")], "Invalid HTTP header value"),
    ],
)
async def test_a_whole_answer_that_may_not_be_sent_is_refused(
    headers: list[tuple[bytes, bytes]], words: str
) -> None:
    cycle = cycle_on(Wire())
    with pytest.raises(RuntimeError, match=words):
        cycle.answer(200, headers, b"hello")
    assert cycle.response_started, "so that nothing else is said instead"
    assert not cycle.response_complete


async def test_what_has_not_changed_has_the_length_it_would_have_and_no_body() -> None:
    wire, ended = Wire(), list[str]()
    cycle = cycle_on(wire, ended=ended)
    assert cycle.answer(304, HEADERS, b""), "RFC 9110, 8.6"
    assert wire.writes == [HEAD.replace(b"200 OK", b"304 Not Modified")]
    assert ended == ["ended"]


async def test_a_tab_may_stand_in_a_value() -> None:
    wire = Wire()
    assert cycle_on(wire).answer(204, [(b"a", b"b\tc\x80")], b"")
    assert wire.writes == [b"HTTP/1.1 204 No Content\r\na: b\tc\x80\r\n\r\n"]


async def test_a_part_can_be_put_only_where_nothing_else_is_to_be_sent_or_waited_for() -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    assert not cycle.is_ready(), "nothing has begun"
    await cycle.send(start([]))
    assert not cycle.is_ready(), "the head is still to be sent"
    await asyncio.sleep(0)
    assert cycle.is_ready()
    cycle.put(b"hello")
    assert wire.writes == [CHUNKED, b"5\r\nhello\r\n"]
    cycle.flow.write_paused = True
    assert not cycle.is_ready(), "the client takes no more for now"
    cycle.flow.write_paused = False
    cycle.disconnected = True
    assert not cycle.is_ready(), "the client is gone"
    cycle.disconnected = False
    wire.closed = True
    assert not cycle.is_ready(), "the connection is about to go"
    wire.closed = False
    assert cycle.is_ready()
    await cycle.send(body(b""))
    assert not cycle.is_ready(), "it is over"
    assert wire.writes == [CHUNKED, b"5\r\nhello\r\n", b"0\r\n\r\n"]


async def test_no_part_can_be_put_where_its_length_is_counted() -> None:
    cycle = cycle_on(Wire())
    await cycle.send(start())
    await asyncio.sleep(0)
    assert not cycle.is_ready()
    await cycle.send(body(b"hello"))
