"""The event loops that the aiohttp transport works in, and those in which it says why not."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from resilient_llm import EventLoopError, Request
from resilient_llm.testing import run_virtual
from resilient_llm.transports.aiohttp import AiohttpTransport

NOWHERE = Request("GET", "http://127.0.0.1:1/", [])


def test_it_says_that_it_works_on_asyncio_only() -> None:
    async def main() -> None:
        with pytest.raises(EventLoopError, match="asyncio only"):
            await AiohttpTransport()(NOWHERE)

    run_virtual(main, backend="trio")


def test_it_belongs_to_one_event_loop() -> None:
    send = AiohttpTransport()

    async def use() -> None:
        with pytest.raises(aiohttp.ClientConnectorError):
            await send(NOWHERE)

    async def misuse() -> None:
        with pytest.raises(EventLoopError, match="another event loop"):
            await send(NOWHERE)

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(use())
        second.run(misuse())
        first.run(send.aclose())
