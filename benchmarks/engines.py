"""What each HTTP engine gets through the client door: requests a second, 64 in flight, over real sockets.

The same completion, and the same stream of 50 events, are asked of one local server (a process of its own, that
answers from memory) through a `ClientDoor` over our own HTTP/1.1 client (`http1`, the sidecar's engine), aiohttp, httpx
and httpx2, without policies. Everything is measured in turns (A B C A B C ...), on uvloop where it is installed;
figures are medians of the rounds. Only their ratios hold.

    python benchmarks/engines.py [--full]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import httpx2

import resilient_llm.httpx
import resilient_llm.httpx2
from benchmarks._answering import BODY, SIZES, server
from benchmarks._running import run
from resilient_llm import Request
from resilient_llm.client import ClientDoor
from resilient_llm.transports.aiohttp import AiohttpTransport
from resilient_llm.transports.http1 import Http1Transport

Ask = Callable[[str], Awaitable[int]]
"""Ask for a path, read the answer, and give its size."""

IN_FLIGHT = 64
HEADERS = [
    (b"Host", b"127.0.0.1"),
    (b"Content-Type", b"application/json"),
    (b"Authorization", b"Bearer none"),
    (b"Accept", b"application/json"),
    (b"Content-Length", str(len(BODY)).encode()),
]


@asynccontextmanager
async def over_ours(transport: AiohttpTransport | Http1Transport, url: str) -> AsyncIterator[Ask]:
    """Ask through a transport for neutral messages."""
    door = ClientDoor(transport, synthesise=transport.synthesise, errors=transport.errors)

    async def ask(path: str) -> int:
        reply = await door.handle(Request("POST", url + path, list(HEADERS), BODY))
        return sum([len(chunk) async for chunk in reply.stream])

    yield ask
    await transport.aclose()


@asynccontextmanager
async def over_family(library: Any, transport: Any, url: str) -> AsyncIterator[Ask]:  # noqa: ANN401 - either library
    """Ask through a `ResilientTransport`, without a client above it."""

    async def ask(path: str) -> int:
        request = library.Request("POST", url + path, headers=HEADERS, content=BODY)
        response = await transport.handle_async_request(request)
        size = sum([len(chunk) async for chunk in response.stream])
        await response.aclose()
        return size

    async with transport:
        yield ask


async def measure(url: str, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Give the requests a second of each engine, for each path."""
    rates: dict[str, dict[str, list[float]]] = {path: {} for path in SIZES}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engines = {
            "http1": await enter(over_ours(Http1Transport(), url)),
            "aiohttp": await enter(over_ours(AiohttpTransport(), url)),
            "httpx2": await enter(over_family(httpx2, resilient_llm.httpx2.ResilientTransport(), url)),
            "httpx": await enter(over_family(httpx, resilient_llm.httpx.ResilientTransport(), url)),
        }
        for _ in range(rounds):
            for path, of_engine in rates.items():
                for name, ask in engines.items():
                    of_engine.setdefault(name, []).append(await rate(ask, path, seconds))
    return {
        path: {name: statistics.median(each) for name, each in of_engine.items()}
        for path, of_engine in rates.items()
    }


async def rate(ask: Ask, path: str, seconds: float) -> float:
    """Ask with so many at once, for so long; gives requests a second."""
    started = time.perf_counter()
    until = started + seconds
    done = 0

    async def one() -> None:
        nonlocal done
        while time.perf_counter() < until:
            assert await ask(path) == SIZES[path]
            done += 1

    await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))
    return done / (time.perf_counter() - started)


async def main(*, full: bool) -> None:
    """Measure, and print a table and a line of JSON."""
    with server() as url:
        await measure(url, 1, 0.1)  # warm
        figures = await measure(url, 9 if full else 3, 1.0 if full else 0.4)
    for path, rates in figures.items():
        for name, each in rates.items():
            print(f"{path:20} {name:8} {each:8.0f} requests/s  {rates['http1'] / each:5.1f}")
    print(
        json.dumps(
            {
                path.rpartition("/")[2]: {n: round(r) for n, r in rates.items()}
                for path, rates in figures.items()
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="more and longer rounds")
    run(main(full=parser.parse_args().full))
