"""Requests that come before others are answered: each in its turn, few at a time, and none outlives its connection."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

import resilient_llm.sidecar.protocol as under_test
from resilient_llm.sidecar.cycle import Cycle
from resilient_llm.sidecar.protocol import GuardedProtocol, guarded
from tests.sidecar.wire import Wire

MOST = 44
"""Requests that are known at a time: as many as find room in what is looked at together, and some."""

BODY = b"a\r\n\r\nb" * 200
KINDS: dict[str, tuple[bytes, int]] = {
    "get": (b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n", 0),
    "post": (b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello", 5),
    "long": (b"POST /%%d HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY), len(BODY)),
    "chunks": (
        b"POST /%d HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
        6,
    ),
    "upgrade": (
        b"POST /%d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\nhello",
        5,
    ),
}
FAULTS: dict[str, tuple[bytes, bytes]] = {
    "none": (b"", b""),
    "no HTTP": (b"\0\r\n\r\n", b"HTTP/1.1 400 "),
    "no host": (b"GET / HTTP/1.1\r\n\r\n" + KINDS["get"][0] % 9, b"HTTP/1.1 400 "),
    "too long a head": (b"GET / HTTP/1.1\r\nx: " + b"y" * 6000, b"HTTP/1.1 431 "),
    "a body that is none": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n" + KINDS["get"][0] % 9,
        b"HTTP/1.1 400 ",
    ),
}


class Reading(Wire):
    """Know whether anything is to be read."""

    paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class World:
    """A connection to an app that takes some turns of the event loop for each answer, and tells what it was asked."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns
        self.wire = Reading()
        self.known: weakref.WeakSet[Cycle] = weakref.WeakSet()
        self.most = 0
        settings = uvicorn.Config(
            self.app, interface="asgi3", log_config=None, access_log=False, lifespan="off"
        )
        settings.load()
        protocol = guarded(max_head=2048, head_timeout=10.0)
        self.protocol: GuardedProtocol | None = protocol(settings, ServerState(), {})
        self.tasks = self.protocol.tasks
        self.protocol.connection_made(self.wire)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message["body"]), message["more_body"]
        for _ in range(self.turns):
            await asyncio.sleep(0)
        told = answer(int(scope["path"][1:]), size)[1]
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(told))],
            }
        )
        await send({"type": "http.response.body", "body": told})

    def read(self, data: bytes) -> None:
        assert self.protocol is not None
        self.protocol.data_received(data)
        self.look()

    def look(self) -> None:
        self.most = max(self.most, len(self.known))

    async def turn(self, until: Callable[[], bool], most: int = 100_000) -> None:
        """Let the event loop go on until something is so, or nothing is done any more."""
        for _ in range(most):
            if until() or not self.tasks:
                break
            await asyncio.sleep(0)
            self.look()

    async def leave(self) -> None:
        protocol, self.protocol = self.protocol, None
        assert protocol is not None
        self.wire.closed = True
        protocol.connection_lost(None)
        for task in self.tasks:
            task.cancel()
        await self.turn(lambda: False)
        await asyncio.sleep(0)


@contextmanager
def noting(world: World) -> Iterator[None]:
    """Know of each request that the protocol knows, without keeping it, and have nobody look for reference cycles."""

    def made(**given: Any) -> Cycle:
        cycle = Cycle(**given)
        world.known.add(cycle)
        return cycle

    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "Cycle", made)
        patch.setattr(logging.getLogger("uvicorn.error"), "disabled", True)
        try:
            yield
        finally:
            gc.enable()


def answer(number: int, size: int) -> tuple[bytes, bytes]:
    body = b"%d: %d" % (number, size)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body


def pieces(sent: bytes, cuts: list[float]) -> list[bytes]:
    places = [0, *sorted(round(cut * len(sent)) for cut in cuts), len(sent)]
    return [sent[begin:end] for begin, end in pairwise(places) if begin < end]


requests = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=60)
cuts = st.lists(st.floats(0, 1), max_size=20)


@settings(deadline=None, max_examples=150)
@given(
    kinds=requests,
    fault=st.sampled_from(sorted(FAULTS)),
    cuts=cuts,
    turns=st.integers(0, 3),
    patient=st.booleans(),
)
def test_however_it_is_divided_each_is_answered_in_its_turn(
    kinds: list[str], fault: str, cuts: list[float], turns: int, patient: bool
) -> None:
    async def main() -> None:
        world = World(turns)
        with noting(world):
            wrong, refusal = FAULTS[fault]
            sent = b"".join(KINDS[kind][0] % number for number, kind in enumerate(kinds)) + wrong
            for piece in pieces(sent, cuts):
                await world.turn(lambda: not world.wire.paused)
                await world.turn(lambda: not patient, most=10)
                world.read(piece)
            await world.turn(lambda: False)
            expected = b"".join(b"".join(answer(number, KINDS[kind][1])) for number, kind in enumerate(kinds))
            written = b"".join(world.wire.writes)
            assert written.startswith(expected + refusal)
            assert written.count(b"HTTP/1.1 ") == len(kinds) + bool(refusal)
            assert world.most <= MOST
            await world.leave()
            assert not world.known

    asyncio.run(main())


@settings(deadline=None, max_examples=100)
@given(
    kinds=requests,
    cuts=cuts,
    turns=st.integers(0, 3),
    when=st.integers(0, 60),
    fault=st.sampled_from(sorted(FAULTS)),
)
def test_whenever_its_client_leaves_all_is_let_go_of(
    kinds: list[str], cuts: list[float], turns: int, when: int, fault: str
) -> None:
    async def main() -> None:
        world = World(turns)
        with noting(world):
            sent = b"".join(KINDS[kind][0] % number for number, kind in enumerate(kinds)) + FAULTS[fault][0]
            for piece in pieces(sent, cuts):
                world.read(piece)
            for _ in range(when):
                await asyncio.sleep(0)
            kept = weakref.ref(world.protocol)
            await world.leave()
            assert not world.known
            assert kept() is None

    asyncio.run(main())


def test_so_much_is_kept_of_what_comes_too_soon_and_no_more() -> None:
    async def main() -> None:
        world = World()
        with noting(world):
            many = b"".join(KINDS["get"][0] % number for number in range(4000))
            world.read(many[:2000])
            assert not world.wire.paused, "whoever leaves is heard of"
            world.read(many[2000:])
            assert world.wire.paused
            assert world.protocol is not None
            world.protocol.watch(lambda: None)
            assert world.wire.paused, "nobody reads on, whatever is to be heard"
            await world.turn(lambda: not world.wire.paused)
            answered = len(world.wire.writes)
            assert 0 < answered < 4000
            await world.turn(lambda: False)
            assert len(world.wire.writes) == 4000
            assert world.most <= MOST
            await world.leave()

    asyncio.run(main())


class Ending(Wire):
    """Can be half closed unless it is TLS, and aborted."""

    def __init__(self, *, tls: bool) -> None:
        super().__init__()
        self.tls = tls
        self.how: list[str] = []

    def can_write_eof(self) -> bool:
        return not self.tls

    def write_eof(self) -> None:
        self.how.append("half")

    def close(self) -> None:
        self.how.append("close")
        self.closed = True

    def abort(self) -> None:
        self.how.append("abort")
        self.closed = True


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_a_few_that_are_too_many_have_time_to_hear_it_and_the_others_none(
    tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
        """Nobody asks."""

    async def main() -> None:
        settings = uvicorn.Config(nothing, log_config=None, access_log=False, lifespan="off")
        settings.load()
        server = ServerState()
        bounded = guarded(max_head=2048, head_timeout=10.0, max_connections=2)
        wires = [Ending(tls=tls) for _ in range(6)]
        protocols = [bounded(settings, server, {}) for _ in wires]
        for wire, protocol in zip(wires, protocols, strict=True):
            protocol.connection_made(wire)
        half = [] if tls else ["half"]
        at_once = [*half, "abort" if tls else "close"]
        assert [wire.how for wire in wires] == [[], [], half, half, at_once, at_once]
        assert all(wire.writes[0].startswith(b"HTTP/1.1 503 ") for wire in wires[2:])
        for protocol in protocols:
            protocol.connection_lost(ConnectionResetError())

    monkeypatch.setattr("resilient_llm.sidecar.counted.AT_THE_DOOR", 2)
    asyncio.run(main())
