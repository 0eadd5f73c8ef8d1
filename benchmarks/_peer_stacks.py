"""Peer libraries, each composed to do as much of what our stack does as it can, with every limit far away.

None of them has all of it: no rate limit by tokens, no adaptive concurrency, no retry budget, no telemetry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, cast

import aiobreaker
import anyio
import purgatory
import pyresilience
import stamina
import tenacity
from aiolimiter import AsyncLimiter
from hyx.bulkhead import bulkhead
from hyx.circuitbreaker import consecutive_breaker
from hyx.ratelimit import tokenbucket
from hyx.retry import retry
from hyx.timeout import timeout

__all__ = ["stacks"]

Handler = Callable[[], Awaitable[int]]

MANY = 1_000_000_000


def hyx_stack(handler: Handler) -> Handler:
    """Give timeout, retry, circuit breaker, bulkhead and token bucket, as decorators."""
    wrapped: Any = handler
    wrapped = bulkhead(max_concurrency=100, max_capacity=200)(wrapped)
    wrapped = consecutive_breaker(failure_threshold=5)(wrapped)
    wrapped = tokenbucket(max_executions=MANY, per_time_secs=1)(wrapped)
    wrapped = retry(attempts=3)(wrapped)
    stack: Handler = timeout(60)(wrapped)
    return stack


def pyresilience_stack(handler: Handler) -> Handler:
    """Give its five policies, in one decorator."""
    decorated: Handler = pyresilience.resilient(
        retry=pyresilience.RetryConfig(max_attempts=3),
        timeout=pyresilience.TimeoutConfig(seconds=60),
        circuit_breaker=pyresilience.CircuitBreakerConfig(),
        bulkhead=pyresilience.BulkheadConfig(max_concurrent=100, max_wait=30),
        rate_limiter=pyresilience.RateLimiterConfig(max_calls=MANY, period=1, max_wait=30),
    )(handler)
    return decorated


async def tenacity_stack(handler: Handler) -> Handler:
    """Compose tenacity, purgatory, a semaphore, asyncio's timeout and aiolimiter by hand."""
    circuits = purgatory.AsyncCircuitBreakerFactory()
    await circuits.initialize()
    semaphore = asyncio.Semaphore(100)
    limiter = AsyncLimiter(MANY, 1)

    @tenacity.retry(stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_random_exponential(0.5, max=8))
    async def attempt() -> int:
        async with limiter, semaphore, await circuits.get_breaker("provider"):
            return await handler()

    async def stack() -> int:
        async with asyncio.timeout(60):
            result: int = await attempt()
            return result

    return stack


def stamina_stack(handler: Handler) -> Handler:
    """Compose stamina, aiobreaker, anyio's capacity limiter and timeout by hand."""
    breaker = aiobreaker.CircuitBreaker(fail_max=5, timeout_duration=timedelta(seconds=15))
    capacity = anyio.CapacityLimiter(100)

    @stamina.retry(on=ConnectionError, attempts=3)
    async def attempt() -> int:
        async with capacity:
            return cast("int", await breaker.call_async(handler))

    async def stack() -> int:
        with anyio.fail_after(60):
            return await attempt()

    return stack


async def stacks(handler: Handler) -> dict[str, Handler]:
    """Compose every peer around `handler`."""
    return {
        "hyx_stack": hyx_stack(handler),
        "pyresilience_stack": pyresilience_stack(handler),
        "tenacity_stack": await tenacity_stack(handler),
        "stamina_stack": stamina_stack(handler),
    }
