"""The event loops that our own connections work in, and those in which they say why not."""

from __future__ import annotations

import asyncio

import pytest

from resilient_llm import EventLoopError, Request
from resilient_llm.testing import run_virtual
from tests.transports.engines import AIOHTTP, HTTP1, Engine

NOWHERE = Request("GET", "http://127.0.0.1:1/", [])
ENGINES = pytest.mark.parametrize("engine", [AIOHTTP, HTTP1], ids=lambda engine: engine.name)


@ENGINES
def test_it_says_that_it_works_on_asyncio_only(engine: Engine) -> None:
    async def main() -> None:
        with pytest.raises(EventLoopError, match="asyncio only"):
            await engine.make()(NOWHERE)

    run_virtual(main, backend="trio")


@ENGINES
def test_it_belongs_to_one_event_loop(engine: Engine) -> None:
    send = engine.make()

    async def use() -> None:
        with pytest.raises(engine.refused):
            await send(NOWHERE)

    async def misuse() -> None:
        with pytest.raises(EventLoopError, match="another event loop"):
            await send(NOWHERE)

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(use())
        second.run(misuse())
        first.run(send.aclose())
