"""The transports that make connections themselves, by what they have in common, and what each calls its failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import anyio

from resilient_llm.message import Reply
from resilient_llm.transports import failures
from resilient_llm.transports.aiohttp import AiohttpTransport, LocalProtocolError
from resilient_llm.transports.http1 import Http1Transport
from resilient_llm.transports.http1_incoming import Body

Transport = AiohttpTransport | Http1Transport


class Engine(NamedTuple):
    """One of them."""

    name: str
    make: Callable[..., Transport]
    busy: Callable[[Any], int]
    """Count the connections that requests have."""
    waiting: Callable[[Reply], int]
    """Count the bytes of a body that wait for its reader."""
    error: type[Exception]
    """All its failures."""
    broken: type[Exception]
    """A connection that broke, or was closed on this side."""
    refused: type[Exception]
    connect_timeout: type[Exception]
    certificate: type[Exception]
    local: type[Exception]
    invalid_url: type[Exception]

    @asynccontextmanager
    async def transport(self, **options: object) -> AsyncIterator[Transport]:
        """Make a transport, and see that it has given everything back when it is done with."""
        before = asyncio.all_tasks()
        it = self.make(**options)
        try:
            yield it
            await self.settled(it, before)
        finally:
            await it.aclose()

    async def settled(self, it: Transport, before: set[asyncio.Task[object]]) -> None:
        """See that no request has a connection or a task of its own any more."""
        for _ in range(500):
            if not self.busy(it) and not ours(before):
                break
            await anyio.sleep(0.002)
        assert not self.busy(it)
        assert not ours(before)


def ours(before: set[asyncio.Task[object]]) -> list[asyncio.Task[object]]:
    return [
        task
        for task in asyncio.all_tasks() - before
        if "serve" not in getattr(task.get_coro(), "__qualname__", "")
    ]


def _busy_of_aiohttp(it: AiohttpTransport) -> int:
    connector = it._session.connector if it._session is not None else None
    return len(connector._acquired) if connector is not None else 0


def _busy_of_http1(it: Http1Transport) -> int:
    return it._pool.in_use if it._pool is not None else 0


def _waiting_in_aiohttp(reply: Reply) -> int:
    size: int = reply.native.content._size  # type: ignore[attr-defined]
    return size


def _waiting_in_http1(reply: Reply) -> int:
    assert isinstance(reply.stream, Body)
    return reply.stream._incoming._size


AIOHTTP = Engine(
    "aiohttp",
    make=AiohttpTransport,
    busy=_busy_of_aiohttp,
    waiting=_waiting_in_aiohttp,
    error=aiohttp.ClientError,
    broken=aiohttp.ClientConnectionError,
    refused=aiohttp.ClientConnectorError,
    connect_timeout=aiohttp.ConnectionTimeoutError,
    certificate=aiohttp.ClientConnectorCertificateError,
    local=LocalProtocolError,
    invalid_url=aiohttp.InvalidURL,
)
HTTP1 = Engine(
    "http1",
    make=Http1Transport,
    busy=_busy_of_http1,
    waiting=_waiting_in_http1,
    error=failures.TransportError,
    broken=failures.TransportError,
    refused=failures.ConnectError,
    connect_timeout=failures.ConnectTimeoutError,
    certificate=failures.ConnectError,
    local=failures.LocalProtocolError,
    invalid_url=failures.InvalidURLError,
)
