"""Large bodies for a target by its name are passed on while they come, and no faster than they are taken."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest
from anyio.abc import SocketAttribute, SocketStream

from tests.sidecar.support import KEY, Log, logged, over_sockets

pytestmark = [pytest.mark.realtime, pytest.mark.anyio]

MIB = 1024 * 1024
FILE = os.urandom(1) * MIB * 3
ANSWER = b"HTTP/1.1 %d Any\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
FORM = "multipart/form-data; boundary=b"
TOML = """
[server]
{server}
[targets.main]
url = "{url}"
passthrough = true
"""


class Provider:
    """Takes requests, as it is told to; `heads` and `bodies` are what came of each."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[bytearray] = []
        self.begun = anyio.Event()
        self.broken = anyio.Event()
        """Set when a request has broken off."""
        self.statuses: list[int] = []
        self.take: Callable[[SocketStream], Awaitable[None]] | None = None
        """What is done in the place of reading a body and answering."""

    async def handle(self, stream: SocketStream) -> None:
        async with stream:
            try:
                while True:
                    await self._one(stream)
            except anyio.EndOfStream:
                self.broken.set()
            except anyio.BrokenResourceError:
                self.broken.set()

    async def _one(self, stream: SocketStream) -> None:
        received = b""
        while b"\r\n\r\n" not in received:
            received += await stream.receive()
        head, _, rest = received.partition(b"\r\n\r\n")
        self.heads.append(head.lower())
        body = bytearray(rest)
        self.bodies.append(body)
        self.begun.set()
        if self.take is not None:
            await self.take(stream)
        while not self._is_whole(head.lower(), body):
            body += await stream.receive()
        await stream.send(ANSWER % (self.statuses.pop(0) if self.statuses else 200))

    @staticmethod
    def _is_whole(head: bytes, body: bytearray) -> bool:
        if b"transfer-encoding: chunked" in head:
            return body.endswith(b"0\r\n\r\n")
        return len(body) >= int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])


class Client:
    """Uploads files."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def send(
        self,
        body: AsyncIterator[bytes] | bytes,
        *,
        method: str = "POST",
        size: int | None = None,
        kind: str = FORM,
        key: str = "of-nobody",
    ) -> httpx2.Response:
        headers = {"content-type": kind, "authorization": f"Bearer {key}"}
        if size is not None:
            headers["content-length"] = str(size)
        return await self._client.request(method, "/main/v1/files", content=body, headers=headers)


@asynccontextmanager
async def sidecar(server: str = "", more: str = "") -> AsyncIterator[tuple[Client, Provider, Log]]:
    """Run a sidecar before a provider; give a client of the one, the other, and the log."""
    provider = Provider()
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610
        toml = TOML.format(server=server, url=f"http://127.0.0.1:{port}") + more
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, provider.handle)
            with logged() as log:
                async with (
                    over_sockets(toml) as (url, _),
                    httpx2.AsyncClient(base_url=url, timeout=30) as client,
                ):
                    yield Client(client), provider, log
            tasks.cancel_scope.cancel()


async def in_parts(data: bytes, after: anyio.Event | None = None) -> AsyncIterator[bytes]:
    """Give a body in parts; the last of them only after something has happened."""
    half = len(data) // 2
    yield data[:half]
    if after is not None:
        with anyio.fail_after(20):
            await after.wait()
    yield data[half:]


@pytest.mark.parametrize("size", [len(FILE), None], ids=["of a length", "in chunks"])
async def test_an_upload_is_at_the_provider_before_its_end_has_left_the_client(size: int | None) -> None:
    async with sidecar() as (client, provider, log):
        answer = await client.send(in_parts(FILE, provider.begun), size=size)
        assert answer.status_code == 200
        (body,) = provider.bodies
        if size is None:
            assert b"transfer-encoding: chunked" in provider.heads[0]
            assert body.count(FILE[:1]) == len(FILE)
        else:
            assert hashlib.sha256(body).digest() == hashlib.sha256(FILE).digest()
        assert (await log.entry())["outcome"] == "ok"


@pytest.mark.parametrize("kind", ["application/json", "application/vnd.api+json; charset=utf-8", ""])
async def test_json_is_read_whole_before_anything_is_sent(kind: str) -> None:
    async with sidecar() as (client, provider, _log):
        with anyio.move_on_after(
            0.3
        ):  # a provider that hears nothing for as long hears nothing before the end
            await client.send(in_parts(FILE, provider.begun), size=len(FILE), kind=kind)
        assert not provider.begun.is_set()


async def test_a_client_waits_for_a_provider_that_takes_nothing() -> None:
    async with sidecar("max_upload = 1_000_000_000") as (client, provider, _):
        go_on, sent = anyio.Event(), 0

        async def take(_stream: SocketStream) -> None:
            await go_on.wait()

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            while not go_on.is_set():
                sent += MIB
                yield bytes(MIB)

        provider.take = take
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.send(endless()))
            await provider.begun.wait()
            before = -1
            with anyio.fail_after(20):
                while sent != before:
                    before = sent
                    await anyio.sleep(0.5)
            # What the system keeps for four sockets, and not what the sidecar would keep.
            assert sent < 100 * MIB
            go_on.set()


async def test_a_small_upload_is_sent_again_and_a_large_one_is_not() -> None:
    async with sidecar() as (client, provider, _log):
        provider.statuses = [503, 200, 503]
        assert (await client.send(in_parts(FILE[: MIB // 2]), method="PUT")).status_code == 200
        assert (await client.send(in_parts(FILE), method="PUT", size=len(FILE))).status_code == 503
        assert len(provider.heads) == 3


async def test_what_is_larger_than_allowed_is_refused_at_once_where_it_says_so() -> None:
    async with sidecar("max_upload = 2_000_000") as (client, provider, log):
        answer = await client.send(in_parts(FILE), size=len(FILE))
        assert answer.status_code == 413
        assert "2000000 bytes" in answer.json()["error"]["message"]
        assert provider.heads == []
        assert (await log.entry())["outcome"] == "refused"


async def test_what_turns_out_larger_than_allowed_breaks_off() -> None:
    async with sidecar("max_upload = 2_000_000") as (client, provider, log):
        answer = await client.send(in_parts(FILE))
        assert answer.status_code == 413
        with anyio.fail_after(20):
            await provider.broken.wait()
        assert (await log.entry())["outcome"] == "refused"


async def test_a_client_that_stops_is_not_waited_for() -> None:
    async with sidecar("body_timeout = 0.5") as (client, provider, log):
        answer = await client.send(in_parts(FILE, provider.broken), size=len(FILE))
        assert answer.status_code == 408
        assert (await log.entry())["status"] == 408


async def test_a_client_that_leaves_ends_the_request_to_the_provider() -> None:
    async with sidecar() as (client, provider, log):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.send(in_parts(FILE, anyio.Event()), size=len(FILE)))
            await provider.begun.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(20):
            await provider.broken.wait()
        assert (await log.entry())["outcome"] == "cancelled"


async def test_an_answer_that_comes_before_the_end_is_passed_on_and_the_connection_closed() -> None:
    async with sidecar() as (client, provider, log):

        async def refuse(stream: SocketStream) -> None:
            await stream.send(ANSWER % 422)
            while True:
                await stream.receive()

        provider.take = refuse
        answer = await client.send(in_parts(FILE, provider.broken), size=len(FILE))
        assert answer.status_code == 422
        assert answer.headers["connection"] == "close"
        entry = await log.entry()
        assert (entry["status"], entry["outcome"]) == (422, "error")


async def test_a_provider_that_breaks_off_is_told_as_one() -> None:
    async with sidecar() as (client, provider, log):

        async def hang_up(stream: SocketStream) -> None:
            await stream.aclose()
            raise anyio.EndOfStream

        provider.take = hang_up
        answer = await client.send(in_parts(FILE, provider.begun), size=len(FILE))
        assert answer.status_code == 502
        assert (await log.entry())["status"] == 502


async def test_slots_are_free_when_an_upload_has_ended_however_it_did() -> None:
    more = "[targets.main.concurrency]\ninitial = 1\nmax = 1\n"
    async with sidecar("body_timeout = 0.2", more) as (client, provider, _log):
        for _ in range(3):
            provider.broken = anyio.Event()
            assert (await client.send(in_parts(FILE, provider.broken), size=len(FILE))).status_code == 408
        assert (await client.send(in_parts(FILE), size=len(FILE))).status_code == 200
        assert provider.heads


async def test_a_tenant_with_a_quota_of_tokens_may_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    more = """
[tenants.acme]
key_env = "KEY_OF_ACME"
passthrough = true
quota = { tokens_per_minute = 100_000, requests_per_minute = 2, max_wait = 0 }
"""
    async with sidecar(more=more) as (client, provider, log):
        for status in (200, 200, 429):
            answer = await client.send(in_parts(FILE), size=len(FILE), key=KEY)
            assert answer.status_code == status, answer.text
        assert (await log.entry(3))["tenant"] == "acme"
        assert len(provider.heads) == 2
