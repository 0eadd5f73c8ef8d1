"""Clients of HTTP/1.0 know no chunks: what they are sent ends with the connection."""

from __future__ import annotations

import json

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from resilient_llm.testing import FakeProvider, Fault, serve
from tests.sidecar.support import ANSWER, ASK, exchange, logged, over_sockets

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


def request(body: bytes, more: bytes = b"") -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n" + more
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"], ids=["plain", "keep-alive"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_ends_with_its_connection(stream: bool, more: bytes) -> None:
    async with (
        serve(FakeProvider()) as upstream,
        over_sockets(f'[targets.main]\nurl = "{upstream}/v1"\n') as (url, _),
    ):
        sent = request(json.dumps({**ASK, "stream": stream}).encode(), more)
        received = await exchange(url, sent, patience=30)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if stream:
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
    else:
        assert b"content-length: %d" % len(body) in head.lower()
        assert json.loads(body)["choices"][0]["message"]["content"] == ANSWER


async def test_a_refusal_has_a_length() -> None:
    async with over_sockets('[targets.main]\nurl = "http://127.0.0.1:1/v1"\n') as (url, _):
        received = await exchange(url, request(b"no JSON"), patience=30)
    assert received.startswith(b"HTTP/1.1 400")
    assert b"content-length" in received


async def read_all(client: SocketStream) -> None:
    while True:
        await client.receive()


async def test_a_reply_that_breaks_off_does_not_end_as_a_whole_one_does() -> None:
    async def cut(stream: SocketStream) -> None:
        async with stream:
            while b"\r\n\r\n" not in await stream.receive():
                pass
            await stream.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n5\r\nsound\r\n"
            )
            await stream.send(b"5\r\nnoi")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        upstream = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"  # noqa: S610
        toml = f'[targets.main]\nurl = "{upstream}/v1"\npassthrough = true\n'
        async with anyio.create_task_group() as tasks, over_sockets(toml) as (url, _):
            tasks.start_soon(listener.serve, cut)
            port = int(url.rpartition(":")[2])
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(b"GET /main/v1/audio HTTP/1.0\r\n\r\n")
                with anyio.fail_after(20), pytest.raises(anyio.BrokenResourceError):
                    await read_all(client)
            tasks.cancel_scope.cancel()


async def test_a_client_that_leaves_in_the_midst_of_a_reply_is_no_defect() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(token_delay=0.02))
    with logged() as log:
        async with (
            serve(provider) as upstream,
            over_sockets(f'[targets.main]\nurl = "{upstream}/v1"\n') as (url, _),
        ):
            async with await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as client:
                await client.send(request(json.dumps({**ASK, "stream": True}).encode()))
                await client.receive()
            assert (await log.entry())["outcome"] == "cancelled"
    assert [line for line in log.lines if '"level": "error"' in line] == []
