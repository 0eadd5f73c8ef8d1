"""What policies cost a call that nothing goes wrong with: microseconds over a handler that returns at once.

A call through a client is measured over a mock transport, where all is the client and the policies, and over a socket,
as callers have it. Everything is measured in one run, in turns (A B C A B C ...), on uvloop where it is installed;
figures are medians of the rounds, so that what else the machine does hits all alike. Only their ratios hold.

    python benchmarks/overhead.py [--full]

Peers are measured where `requirements/bench.txt` is installed (scripts/bench does that).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import httpx2

import resilient_llm.httpx
import resilient_llm.httpx2
from benchmarks._answering import ANSWER, BODY, COMPLETION, server
from benchmarks._running import run
from resilient_llm import (
    Bulkhead,
    Call,
    CircuitBreaker,
    ConcurrencyLimit,
    Deadline,
    Pipeline,
    Policy,
    RateLimit,
    Retry,
    TokenEstimate,
)

Timed = Callable[[], Awaitable[object]]
Estimate = Callable[[Call], float]

FAR = 1_000_000_000


async def answer() -> int:
    """Return at once: whatever else is measured is the policies' doing."""
    return 1


def policies(estimate: Estimate) -> dict[str, Policy]:
    """Make one policy of each kind, with limits that are never reached."""
    return {
        "deadline": Deadline(60),
        "bulkhead": Bulkhead(max_concurrent=100),
        "retry": Retry(),
        "rate_limit": RateLimit(
            requests_per_minute=FAR, tokens_per_minute=FAR, key="target", estimate=estimate
        ),
        "concurrency": ConcurrencyLimit(initial=100),
        "breaker": CircuitBreaker(),
    }


def in_process() -> dict[str, Timed]:
    """Give the bare handler, each policy alone around it, and all of them."""
    made = policies(lambda _call: 100)  # a function has no prompt to estimate from
    cases: dict[str, Timed] = {"bare": answer, "pipeline": partial(Pipeline().run, answer)}
    for name, policy in made.items():
        cases[name] = partial(Pipeline([policy]).run, answer)
    cases["stack"] = partial(Pipeline(list(made.values())).run, answer)
    return cases


def over_a_client(library: Any, door: Any, name: str, url: str) -> dict[str, Timed]:  # noqa: ANN401 - either library
    """Give a chat completion through a client, bare and with all policies: over a mock transport, and over a socket."""

    def respond(_request: object) -> object:
        return library.Response(200, headers={"content-type": "application/json"}, content=ANSWER)

    def post(transport: object, where: str) -> Timed:
        client = library.AsyncClient(transport=transport)
        headers = {"content-type": "application/json"}
        return partial(client.post, where + COMPLETION, content=BODY, headers=headers)

    def resilient(transport: object) -> object:
        return door.ResilientTransport(transport, policies=list(policies(TokenEstimate()).values()))

    mock, limits = library.MockTransport(respond), library.Limits(max_connections=None)
    return {
        f"{name}_bare": post(mock, "http://provider.example"),
        f"{name}_stack": post(resilient(mock), "http://provider.example"),
        f"{name}_socket_bare": post(library.AsyncHTTPTransport(limits=limits), url),
        f"{name}_socket_stack": post(resilient(library.AsyncHTTPTransport(limits=limits)), url),
    }


async def peers() -> dict[str, Timed]:
    """Give the peers' stacks, where they are installed."""
    if any(
        importlib.util.find_spec(module) is None for module in ("hyx", "pyresilience", "purgatory", "stamina")
    ):
        return {}
    from benchmarks import _peer_stacks  # noqa: PLC0415 - they are not ours to require

    return dict(await _peer_stacks.stacks(answer))


async def measure(cases: dict[str, Timed], rounds: int, seconds: float) -> dict[str, float]:
    """Time every case in turns; gives the median of the rounds, in microseconds a call."""
    counts: dict[str, int] = {}
    for name, case in cases.items():
        began = time.perf_counter()
        for _ in range(50):
            await case()
        counts[name] = max(20, int(seconds / ((time.perf_counter() - began) / 50)))
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            await asyncio.sleep(0)  # calls that never wait leave cancelled timers for the loop to clear away
            began = time.perf_counter()
            for _ in range(counts[name]):
                await case()
            times[name].append((time.perf_counter() - began) / counts[name] * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


async def main(rounds: int) -> None:
    """Measure, print a table, and the figures as JSON in the last line."""
    cases = in_process() | await peers()
    with server() as url:
        cases |= over_a_client(httpx, resilient_llm.httpx, "httpx", url)
        cases |= over_a_client(httpx2, resilient_llm.httpx2, "httpx2", url)
        figures = await measure(cases, rounds, 0.02)
    bare = figures["bare"]
    print(f"{'':<20}{'us a call':>10}{'over bare':>11}{'x stack':>9}")
    for name, value in figures.items():
        of_stack = "" if "httpx" in name else f"{(value - bare) / (figures['stack'] - bare):9.2f}"
        print(f"{name:<20}{value:>10.1f}{value - bare:>11.1f}{of_stack}")
    for library in ("httpx", "httpx2"):
        mock, socket = (
            figures[f"{library}{how}_stack"] / figures[f"{library}{how}_bare"] for how in ("", "_socket")
        )
        print(
            f"{library}: a call through all policies takes {mock:.2f} times the bare one, over a socket {socket:.2f}"
        )
    print(json.dumps({f"{name}_us": round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="five times as many rounds")
    run(main(125 if parser.parse_args().full else 25))
