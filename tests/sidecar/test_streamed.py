"""Events on their way through the sidecar, over sockets: all of them, in order, however slowly they are taken."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import cast

import anyio
import pytest

from resilient_llm.sidecar.cycle import Cycle
from tests.sidecar.support import logged, over_sockets
from tests.streams.scripted import ASK, DONE, says
from tests.support import A_HANG
from tests.transports.wire import Connection, wire

pytestmark = [pytest.mark.realtime, pytest.mark.anyio]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = json.dumps(ASK).encode()


def event(number: int) -> bytes:
    return says(f"{number} " * 2000)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def unframed(reader: asyncio.StreamReader) -> bytes:
    """Read a body in chunks to its end."""
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readline() == b"\r\n"
    assert await reader.readline() == b"\r\n"
    return body


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_takes_nothing_for_a_while_gets_all_of_it(
    version: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = asyncio.Event()
    sent: list[bytes] = []
    put: list[bytes] = []
    put_there = Cycle.put

    def putting(cycle: Cycle, data: bytes) -> None:
        put.append(data)
        put_there(cycle, data)

    monkeypatch.setattr(Cycle, "put", putting)

    async def provider(connection: Connection) -> None:
        await connection.request()
        connection.writer.write(HEAD)
        after = 0
        while after < 50:
            sent.append(event(len(sent)))
            connection.writer.write(chunked(sent[-1]))
            if not full.is_set() and connection.writer.transport.get_write_buffer_size():
                full.set()  # nobody takes any more, from here to the client
            after += full.is_set()
            if after:
                await connection.writer.drain()
            else:
                await asyncio.sleep(0)
        sent.append(says("", "stop") + DONE)
        await connection.send(chunked(sent[-1]) + b"0\r\n\r\n")
        await connection.until_gone()

    toml = "[targets.main]\nurl = {url}\n"
    async with wire(provider) as upstream:
        target = toml.format(url=json.dumps(f"{upstream.url}/v1"))
        with logged() as log:
            async with over_sockets(target) as (url, _sidecar):
                host, port = url.removeprefix("http://").split(":")
                sock = socket.create_connection((host, int(port)))
                reader, writer = await asyncio.open_connection(sock=sock)
                with anyio.fail_after(2 * A_HANG):
                    incoming = cast("asyncio.Transport", writer.transport)
                    incoming.pause_reading()
                    writer.write(
                        b"POST /v1/chat/completions HTTP/%b\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
                        % (version, len(BODY), BODY)
                    )
                    await full.wait()
                    incoming.resume_reading()
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200")
                    body = await (unframed(reader) if version == b"1.1" else reader.read())
                    assert body == b"".join(sent)
                    assert bool(put) is (version == b"1.1"), "past the task, where there are chunks"
                    assert (await log.entry())["status"] == 200
                writer.close()


async def test_a_provider_that_breaks_off_is_told_of_after_its_last_whole_event() -> None:
    proceed = asyncio.Event()

    async def provider(connection: Connection) -> None:
        await connection.request()
        await connection.send(HEAD, chunked(event(0)))
        await proceed.wait()
        await connection.send(chunked(event(1)), chunked(event(2) + b'data: {"half'))

    async with wire(provider) as upstream:
        target = f'[targets.main]\nurl = "{upstream.url}/v1"\n[retry]\nenabled = false\n'
        async with over_sockets(target) as (url, _sidecar):
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with anyio.fail_after(A_HANG):
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(BODY), BODY)
                )
                await reader.readuntil(b"\r\n\r\n")  # some of the body is on its way, too
                proceed.set()
                body = await unframed(reader)
            writer.close()
    whole = event(0) + event(1) + event(2)
    assert body.startswith(whole)
    told = body.removeprefix(whole)
    assert told.startswith(b'data: {"error"')
    assert told.count(b"\n\n") == 1
    assert told.endswith(b"\n\n")
