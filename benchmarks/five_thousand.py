"""5,000 items at once against a provider that enforces requests and tokens per minute, in virtual time.

Three ways of sending them: everything at once with retries only, a fixed concurrency with retries, and through
`RateLimit`. Printed are what share of the requests the provider refused (429), how much of its limits was used,
and when the last item was done. Nothing here waits really.

    python benchmarks/five_thousand.py [--full]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass

import anyio
import httpx

from resilient_llm import Bulkhead, Policy, RateLimit, Retry
from resilient_llm.httpx import ResilientTransport
from resilient_llm.testing import FakeModel, FakeProvider, Latency, ProviderRequest, RateLimits, run_virtual

__all__ = ["Figures", "measure"]

REQUESTS_PER_MINUTE = 3_000
TOKENS_PER_MINUTE = 600_000
URL = "https://provider.example/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of a run: `throttled_ratio` of requests refused, `used_ratio` of the binding limit, seconds."""

    throttled_ratio: float
    used_ratio: float
    seconds: float
    failed: int


def policies(way: str) -> list[Policy]:
    """Give the policies of one way of sending."""
    patient = Retry(max_attempts=20, max_retry_after=600, budget_ratio=1.0, budget_min_per_second=1_000)
    if way == "retries only":
        return [patient]
    if way == "40 at a time":
        return [Bulkhead(max_concurrent=40, max_queued=100_000, max_wait=math.inf, key="target"), patient]
    limit = RateLimit(
        requests_per_minute=REQUESTS_PER_MINUTE,
        tokens_per_minute=TOKENS_PER_MINUTE,
        key="target",
        max_wait=math.inf,
        max_queued=100_000,
    )
    return [patient, limit]


async def measure(way: str, items: int, seed: int) -> Figures:
    """Send the items; their prompts and answers differ in length, and the estimate of tokens is ours."""
    rng = random.Random(seed)
    words = [rng.randint(20, 120) for _ in range(items)]

    def reply(request: ProviderRequest) -> str:
        return "word " * min(120, 20 + request.number % 100)

    model = FakeModel(
        latency=Latency(headers=0.42, spread=0.3),
        reply=reply,
        rate_limits=RateLimits(requests_per_minute=REQUESTS_PER_MINUTE, tokens_per_minute=TOKENS_PER_MINUTE),
    )
    provider = FakeProvider(model, rng=rng)
    transport = ResilientTransport(provider.transport(), policies=policies(way))
    failed = 0
    started = anyio.current_time()

    async def one(client: httpx.AsyncClient, prompt_words: int) -> None:
        nonlocal failed
        body = {
            "model": "gpt-4o",
            "max_tokens": 120,
            "messages": [{"role": "user", "content": "word " * prompt_words}],
        }
        response = await client.post(URL, json=body)
        failed += response.status_code != httpx.codes.OK

    async with (
        httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(None)) as client,
        anyio.create_task_group() as group,
    ):
        for prompt_words in words:
            group.start_soon(one, client, prompt_words)
    seconds = anyio.current_time() - started
    throttled = sum(request.status == httpx.codes.TOO_MANY_REQUESTS for request in provider.requests)
    served = [request for request in provider.requests if request.status == httpx.codes.OK]
    tokens = sum(request.prompt_tokens + request.tokens_sent for request in served)
    # A full minute's allowance is there at the start.
    used = max(
        len(served) / (REQUESTS_PER_MINUTE * (1 + seconds / 60)),
        tokens / (TOKENS_PER_MINUTE * (1 + seconds / 60)),
    )
    return Figures(throttled / len(provider.requests), used, seconds, failed)


def main(seeds: int) -> None:
    """Print a table, and the figures as JSON in the last line."""
    print(f"5,000 items; {REQUESTS_PER_MINUTE:,} requests and {TOKENS_PER_MINUTE:,} tokens per minute")
    print(f"{'':<14}{'429 ratio':>11}{'limit used':>12}{'seconds':>9}{'failed':>8}")
    figures: dict[str, float] = {}
    for way in ("retries only", "40 at a time", "RateLimit"):
        worst = None
        for seed in range(seeds):
            run = run_virtual(measure, way, 5_000, seed)
            if worst is None or run.throttled_ratio > worst.throttled_ratio:
                worst = run
        assert worst is not None
        print(
            f"{way:<14}{worst.throttled_ratio:>11.2%}{worst.used_ratio:>12.1%}"
            f"{worst.seconds:>9.1f}{worst.failed:>8}"
        )
        key = way.replace(" ", "_").lower()
        figures |= {
            f"{key}_throttled_ratio": round(worst.throttled_ratio, 5),
            f"{key}_used_ratio": round(worst.used_ratio, 4),
            f"{key}_seconds": round(worst.seconds, 1),
            f"{key}_failed": worst.failed,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="five seeds; the worst is printed")
    main(5 if parser.parse_args().full else 1)
