"""Writes that are put off: what comes to a connection, in which order, before what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilient_llm.transports.batched import Batch, BatchedTransport

LARGE = 100_000


class Loop:
    """Runs what was given to it when it is told to."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], object]] = []
        self.reported: list[BaseException] = []

    def call_soon(self, callback: Callable[..., object], *args: object, context: object = None) -> object:
        assert (args, context) == ((), None)
        self.ready.append(callback)
        return None

    def call_exception_handler(self, context: dict[str, object]) -> None:
        error = context["exception"]
        assert isinstance(error, Exception)
        self.reported.append(error)

    def turn(self) -> None:
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()


class Wire(asyncio.Transport):
    """Notes what is done, and when, among all wires of a loop."""

    def __init__(self, log: list[tuple[str, int, bytes]], number: int = 0) -> None:
        super().__init__()
        self.log, self.number = log, number
        self.closing = False
        self.has_ended = False
        self.fails = False

    def note(self, what: str, data: bytes = b"") -> None:
        self.log.append((what, self.number, data))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        if self.has_ended or self.fails:
            raise RuntimeError("not after write_eof()")
        self.note("write", bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self.has_ended = True
        self.note("eof")

    def close(self) -> None:
        self.closing = True
        self.note("close")

    def abort(self) -> None:
        self.closing = True
        self.note("abort")

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0


class World:
    """Some connections of one loop."""

    def __init__(self, connections: int = 3) -> None:
        self.loop = Loop()
        self.batch = Batch(cast("asyncio.AbstractEventLoop", self.loop))
        self.log: list[tuple[str, int, bytes]] = []
        self.wires = [Wire(self.log, number) for number in range(connections)]
        self.transports = [BatchedTransport(wire, self.batch) for wire in self.wires]

    def busy(self) -> World:
        """Let there be a turn with several writes, after which they are put off."""
        for transport in self.transports:
            transport.write(b"x")
        self.loop.turn()
        self.log.clear()
        return self


def test_a_write_by_itself_is_done_at_once() -> None:
    world = World()
    for _ in range(3):
        world.transports[0].write(b"a")
        assert world.log.pop() == ("write", 0, b"a")
        world.loop.turn()
        assert not world.log
        assert not world.loop.ready  # nothing goes on by itself


def test_several_in_a_turn_are_put_off_from_the_next() -> None:
    world = World()
    for transport in world.transports:
        transport.write(b"a")
    assert len(world.log) == 3  # nobody knew
    world.loop.turn()
    world.log.clear()
    for transport in world.transports:
        transport.write(b"b")
        transport.writelines((b"c", b"d"))
    assert not world.log
    world.loop.turn()
    assert world.log == [("write", number, b"bcd") for number in range(3)]


def test_when_there_was_one_in_a_turn_they_are_done_at_once_again() -> None:
    world = World().busy()
    world.transports[0].write(b"a")
    assert not world.log
    world.loop.turn()
    assert world.log == [("write", 0, b"a")]
    world.transports[0].write(b"b")
    assert world.log[1:] == [("write", 0, b"b")]


@pytest.mark.parametrize("end", ["write_eof", "close"])
def test_the_end_comes_after_what_was_written_before_it(end: str) -> None:
    world = World().busy()
    world.transports[0].write(b"a")
    getattr(world.transports[0], end)()
    assert world.log == [("write", 0, b"a"), (end.removeprefix("write_"), 0, b"")]
    world.loop.turn()
    assert len(world.log) == 2


def test_what_was_put_off_is_dropped_with_its_connection() -> None:
    world = World().busy()
    transport = world.transports[0]
    transport.write(b"a")
    transport.abort()
    assert transport.get_write_buffer_size() == 0
    world.loop.turn()
    assert world.log == [("abort", 0, b"")]


def test_what_a_lost_connection_was_to_be_sent_is_dropped() -> None:
    world = World().busy()
    for transport in world.transports:
        transport.write(b"a")
    world.wires[1].closing = True
    world.loop.turn()
    assert world.log == [("write", 0, b"a"), ("write", 2, b"a")]


def test_a_write_that_fails_is_reported_and_keeps_no_other_from_being_done() -> None:
    world = World().busy()
    world.wires[0].fails = True
    for transport in world.transports:
        transport.write(b"a")
    world.loop.turn()
    assert world.log == [("write", 1, b"a"), ("write", 2, b"a")]
    assert [str(error) for error in world.loop.reported] == ["not after write_eof()"]


def test_a_connection_puts_off_so_much_and_no_more() -> None:
    world = World().busy()
    transport = world.transports[0]
    for _ in range(10):
        transport.write(bytes(10_000))
        assert transport.get_write_buffer_size() <= 65_536
    assert sum(len(data) for _, _, data in world.log) == 70_000


def test_so_many_writes_are_put_off_and_no_more() -> None:
    world = World(100).busy()
    for transport in world.transports:
        transport.write(b"a")
    assert len(world.log) == 96  # three times 32: the first do not wait for the last
    world.loop.turn()
    assert world.log == [("write", number, b"a") for number in range(100)]


def test_what_is_put_off_is_what_it_was() -> None:
    world = World().busy()
    data = bytearray(b"a")
    world.transports[0].write(data)
    data[:] = b"b"
    world.loop.turn()
    assert world.log == [("write", 0, b"a")]


class Writing(RuleBasedStateMachine):
    """Whatever is done in whatever order, each wire sees what it would see without a batch, by the end of the turn.

    But for what is dropped with a connection that is aborted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.written: list[tuple[int, bytes]] = []
        self.expected: list[list[bytes]] = [[] for _ in self.world.wires]
        self.since_turn = 0

    def open(self) -> bool:
        return not all(wire.closing for wire in self.world.wires)

    @precondition(lambda self: self.open())
    @rule(data=st.data(), sizes=st.lists(st.sampled_from([1, 2, LARGE]), min_size=1, max_size=3))
    def write(self, data: st.DataObject, sizes: list[int]) -> None:
        number = data.draw(st.sampled_from([w.number for w in self.world.wires if not w.closing]))
        transport = self.world.transports[number]
        pieces = [bytes([self.since_turn % 256]) * size for size in sizes]
        if len(pieces) == 1:
            transport.write(pieces[0])
        else:
            transport.writelines(pieces)
        self.expected[number].extend(pieces)
        self.since_turn += 1

    @precondition(lambda self: self.open())
    @rule(data=st.data(), end=st.sampled_from(["close", "abort"]))
    def end(self, data: st.DataObject, end: str) -> None:
        number = data.draw(st.sampled_from([w.number for w in self.world.wires if not w.closing]))
        getattr(self.world.transports[number], end)()
        if end == "abort":
            self.expected[number] = [self.sent(number)]
        assert self.sent(number) == b"".join(self.expected[number])

    @rule()
    def turn(self) -> None:
        self.world.loop.turn()
        self.since_turn = 0

    def sent(self, number: int) -> bytes:
        return b"".join([data for what, of, data in self.world.log if (what, of) == ("write", number)])

    @invariant()
    def nothing_is_lost_or_out_of_order(self) -> None:
        for number, expected in enumerate(self.expected):
            whole, sent = b"".join(expected), self.sent(number)
            put_off = self.world.transports[number].get_write_buffer_size()
            assert whole.startswith(sent)
            assert len(sent) + put_off == len(whole)
            if not self.since_turn:
                assert not put_off

    @invariant()
    def at_most_one_callback_waits(self) -> None:
        assert len(self.world.loop.ready) == (self.since_turn > 0)


TestWriting = Writing.TestCase
TestWriting.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
