"""What surrounds a body has the same bound, however what a client sends is divided into reads."""

from __future__ import annotations

import asyncio
import logging

import anyio
import pytest
import uvicorn
from uvicorn.server import ServerState

from resilient_llm.sidecar.protocol import GuardedProtocol, guarded
from tests.sidecar.hostile_inputs import REFUSED, TAKEN
from tests.sidecar.wire import Wire

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

READS = [1_000, 65_536, 262_144, 1_000_000]
"""Bytes in a read: event loops have 64 KiB and 256 KiB at most, less where a network or a scheduler divides."""


def connected(wire: Wire) -> GuardedProtocol:
    """Put an app that reads the body of what it is asked, and says nothing, at the end of a connection."""

    async def app(_scope: object, receive: object, _send: object) -> None:
        assert callable(receive)
        while (await receive()).get("more_body"):
            pass
        await asyncio.get_running_loop().create_future()

    settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    settings.load()
    protocol = guarded(max_head=65_536, head_timeout=10.0)(settings, ServerState(), {})
    protocol.connection_made(wire)
    return protocol


async def read(protocol: GuardedProtocol, sent: bytes, size: int) -> None:
    for begin in range(0, len(sent), size):
        protocol.data_received(sent[begin : begin + size])
        await anyio.lowlevel.checkpoint()


async def leave(protocol: GuardedProtocol) -> None:
    protocol.connection_lost(None)
    tasks = list(protocol.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("size", READS)
@pytest.mark.parametrize(
    "name", ["many trailers", "a trailer that does not end", "an extension that does not end"]
)
async def test_too_much_around_a_body_is_refused(
    name: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    wire = Wire()
    protocol = connected(wire)
    await read(protocol, REFUSED[name], size)
    assert b"".join(wire.writes).startswith(b"HTTP/1.1 431 ")
    await leave(protocol)


@pytest.mark.parametrize("size", [1, *READS])
async def test_a_few_trailers_are_not(size: int) -> None:
    wire = Wire()
    protocol = connected(wire)
    await read(protocol, TAKEN["trailers"], size)
    assert wire.writes == []
    assert not protocol.cycle.more_body
    await leave(protocol)


@pytest.mark.parametrize("size", READS)
async def test_a_body_is_whole_however_it_came(size: int) -> None:
    body = bytes(range(256)) * 2_000
    wire = Wire()
    protocol = connected(wire)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    received = bytearray()
    for begin in range(0, len(head + body), size):
        protocol.data_received((head + body)[begin : begin + size])
        received += protocol.cycle.body
        protocol.cycle.body = bytearray()
    assert received == body
    await leave(protocol)
