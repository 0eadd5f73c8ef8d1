"""What is no HTTP, or meant to be read in two ways: 4xx and a line in the log, never a 5xx, and the sidecar goes on."""

from __future__ import annotations

import time

import anyio
import httpx
import pytest

from resilient_llm.testing import FakeProvider, Fault, serve
from tests.sidecar.support import ANSWER, ASK, exchange, logged, over_sockets

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

BODY = b'{"model":"m","messages":[]}'
LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"

HOSTILE = {
    "length and chunked": LINE + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": LINE + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": LINE + b"content-length: 27\r\ncontent-length: 5\r\n\r\n" + BODY,
    "a list of lengths": LINE + b"content-length: 27, 27\r\n\r\n" + BODY,
    "a negative length": LINE + b"content-length: -1\r\n\r\n",
    "a signed length": LINE + b"content-length: +27\r\n\r\n" + BODY,
    "a hexadecimal length": LINE + b"content-length: 0x1b\r\n\r\n" + BODY,
    "an unknown transfer coding": LINE + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked, then another": LINE + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked with a tab": LINE + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "a name with a blank": LINE + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "a chunk of no size": LINE + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk of a negative size": LINE + b"transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    "a chunk of too large a size": LINE
    + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "a chunk without its end": LINE + b"transfer-encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n",
    "folded headers": LINE + b"x-a: 1\r\n b\r\ncontent-length: 2\r\n\r\n{}",
    "a header without a colon": LINE + b"nonsense\r\ncontent-length: 2\r\n\r\n{}",
    "a NUL in a header": LINE + b"x-a: \x00\r\ncontent-length: 2\r\n\r\n{}",
    "a bare CR in a header": LINE + b"x-a: 1\rx-b: 2\r\ncontent-length: 2\r\n\r\n{}",
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    "a request line of three words too many": b"POST /v1/x y z HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/2 by prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "bytes above ASCII in the path": b"GET /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "a NUL in the path": b"GET /v1/\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path without a slash": b"GET v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "dots": b"GET /main/../../admin/config HTTP/1.1\r\nhost: x\r\n\r\n",
    "encoded dots": b"GET /main/%2e%2e/admin HTTP/1.1\r\nhost: x\r\n\r\n",
    "encoded slashes": b"GET /main/a%2f%2e%2e%2fb HTTP/1.1\r\nhost: x\r\n\r\n",
    "two slashes": b"GET //evil.example/v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "a backslash": b"GET /main\\..\\x HTTP/1.1\r\nhost: x\r\n\r\n",
    "a query that is none": b'POST /v1/chat/completions?a="<> HTTP/1.1\r\nhost: x\r\ncontent-length: 27\r\n\r\n'
    + BODY,
    "invalid UTF-8": LINE + b'content-length: 14\r\n\r\n{"model":"\xff\xfe"}',
    "deep JSON": LINE + b"content-length: 200000\r\n\r\n" + b"[" * 200_000,
    "deep JSON inside": LINE + b'content-length: 100014\r\n\r\n{"model":"m","' + b"[" * 100_000,
    "an unknown method": b"BREW /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "an empty body": LINE + b"content-length: 0\r\n\r\n",
    "many headers": LINE + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
    "one huge header": LINE + b"x-a: " + b"y" * 300_000 + b"\r\n\r\n",
    "a head of a little too much": LINE + b"x-a: " + b"y" * 66_000 + b"\r\n\r\n",
    "a huge path": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a header that never ends": LINE + b"x-a: " + b"y" * 300_000,
    "an upgrade": LINE + b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 27\r\n\r\n" + BODY,
    "a body that is too large": LINE + b"content-length: 99999999999999999999999999\r\n\r\n",
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
async def test_what_is_hostile_gets_a_4xx_and_a_line(sent: bytes) -> None:
    provider = FakeProvider()
    async with serve(provider) as upstream:
        toml = f'[targets.main]\nurl = "{upstream}/v1"\npassthrough = true\n'
        with logged() as log:
            async with over_sockets(toml) as (url, _):
                received = await exchange(url, sent, patience=2)
                assert received.startswith(b"HTTP/1.1 4"), received[:200]
                await log.line()
                async with httpx.AsyncClient() as client:  # and the next one is served
                    reply = await client.post(f"{url}/v1/chat/completions", json=ASK)
                assert reply.json()["choices"][0]["message"]["content"] == ANSWER
    assert len(provider.requests) == 1
    assert not [line for line in log.lines if '"level": "error"' in line]


async def test_a_head_that_is_sent_slowly_is_not_waited_for() -> None:
    with logged() as log:
        async with over_sockets('[targets.main]\nurl = "http://127.0.0.1:9"\n', head_timeout=0.3) as (url, _):
            began = time.monotonic()
            for sent in (b"", b"POST /v1/chat", LINE, LINE + b"x-a: b\r\n"):
                received = await exchange(url, sent or b"\r\n")
                assert received.startswith(b"HTTP/1.1 408")
            assert time.monotonic() - began < 5
    assert any("Request Timeout" in line for line in log.lines)


async def test_a_second_head_on_a_connection_has_its_limits_too() -> None:
    provider = FakeProvider()
    async with serve(provider) as upstream:
        toml = f'[targets.main]\nurl = "{upstream}/v1"\n'
        async with over_sockets(toml, head_timeout=0.3) as (url, _):
            whole = LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
            host, port = url.removeprefix("http://").split(":")
            async with await anyio.connect_tcp(host, int(port)) as stream:
                for _ in range(2):
                    await stream.send(whole)
                    assert (await stream.receive()).startswith(b"HTTP/1.1 200")
                    await anyio.sleep(0.5)  # longer than a head may take: nothing has begun
                await stream.send(LINE)
                received = b""
                with anyio.fail_after(3):
                    while b"408" not in received:
                        received += await stream.receive()


async def test_what_comes_with_a_request_has_its_limits_too() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(), Fault(token_delay=0.1), Fault(token_delay=0.1)])
    whole = LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    stream = BODY.replace(b"}", b',"stream":true}')
    streamed = LINE + b"content-length: %d\r\n\r\n" % len(stream) + stream
    async with serve(provider) as upstream:
        toml = f'[targets.main]\nurl = "{upstream}/v1"\n'
        async with over_sockets(toml, head_timeout=0.3) as (url, _):
            host, port = url.removeprefix("http://").split(":")
            # The beginning of another head, in one piece with a request: what is answered first, then 408.
            received = await everything(host, int(port), whole + LINE)
            assert received.startswith(b"HTTP/1.1 200")
            assert received.endswith(
                b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            # In the midst of a stream nothing can be said: it ends, and not as if it were whole.
            for more in (LINE, b"\0\0\0\r\n\r\n"):
                received = await everything(host, int(port), streamed + more)
                assert received.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
                assert received.count(b"HTTP/1.1 ") == 1
                assert not received.endswith(b"0\r\n\r\n")


async def everything(host: str, port: int, sent: bytes) -> bytes:
    received = b""
    async with await anyio.connect_tcp(host, port) as stream:
        await stream.send(sent)
        try:
            with anyio.fail_after(5):
                while True:
                    received += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return received


async def test_names_with_line_breaks_write_no_lines() -> None:
    provider = FakeProvider()
    async with serve(provider) as upstream:
        with logged() as log:
            async with (
                over_sockets(f'[targets.main]\nurl = "{upstream}/v1"\n') as (url, _),
                httpx.AsyncClient() as client,
            ):
                forged = 'x\r\n{"level": "info", "forged": true}'
                await client.post(f"{url}/v1/chat/completions", json={**ASK, "model": forged})
                entry = await log.entry()
    assert entry["model"] == forged
    assert all("\n" not in line for line in log.lines)
