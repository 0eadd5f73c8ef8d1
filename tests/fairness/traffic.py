"""Two tenants at one door, a noisy one that wants everything and a quiet one, and what became of their calls."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Literal

import anyio
from starlette.types import Receive, Scope, Send

from resilient_llm import Bulkhead, BulkheadFullError, Pipeline, ambient
from resilient_llm.asgi import ResilienceMiddleware
from tests.asgi.server import Connection, respond

Arrivals = Literal["poisson", "paced", "closed loop"]


def p99(values: list[float]) -> float:
    """Give the 99th percentile (nearest rank)."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


class Visit:
    """One call: when it came, got its slot and was done."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.came = self.began = self.ended = math.nan
        self.own_ahead = 0
        """Calls of its own tenant that waited when it came."""
        self.releases = 0
        """Slots that were released while it waited."""

    @property
    def wait(self) -> float:
        return self.began - self.came

    @property
    def total(self) -> float:
        return self.ended - self.came


class Street:
    """A door behind which every call takes a while, as `hold` says; remembers all that happens there."""

    def __init__(self, hold: Callable[[str], float]) -> None:
        self.hold = hold
        self.served: dict[str, list[Visit]] = {}
        self.refused = Counter[str]()
        self.waiting = Counter[str]()
        self.order: list[str] = []
        self.releases: list[float] = []
        self.running = 0
        self.peak = 0

    async def visit(self, tenant: str, enter: Callable[[Visit], Awaitable[object]]) -> None:
        """Make one call."""
        visit = Visit(tenant)
        visit.came = anyio.current_time()
        visit.own_ahead = self.waiting[tenant]
        visit.releases = -len(self.releases)
        self.waiting[tenant] += 1
        try:
            await enter(visit)
        except BulkheadFullError:
            self.refused[tenant] += 1
            await anyio.sleep(0.1)
        finally:
            if math.isnan(visit.began):
                self.waiting[tenant] -= 1

    async def serve(self, visit: Visit) -> None:
        """Be the work that a call has a slot for."""
        self.waiting[visit.tenant] -= 1
        visit.began = anyio.current_time()
        visit.releases += len(self.releases)
        self.order.append(visit.tenant)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await anyio.sleep(self.hold(visit.tenant))
        finally:
            self.running -= 1
            self.releases.append(anyio.current_time())
        visit.ended = anyio.current_time()
        self.served.setdefault(visit.tenant, []).append(visit)

    def waits(self, tenant: str) -> list[float]:
        return [visit.wait for visit in self.served[tenant]]

    def totals(self, tenant: str) -> list[float]:
        return [visit.total for visit in self.served[tenant]]

    def interval(self, since: float, until: float) -> float:
        """Give the 99th percentile of the time between two releases in succession, between two times."""
        times = [time for time in self.releases if since <= time <= until]
        return p99([later - earlier for earlier, later in itertools.pairwise(times)])


Enter = Callable[[str], Coroutine[Any, Any, None]]
"""Make a call of a tenant, and wait until it is over."""


def callable_door(street: Street, *bulkheads: Bulkhead) -> Enter:
    """Give the way in around a function."""
    pipelines = itertools.cycle([Pipeline([bulkhead]) for bulkhead in bulkheads])

    async def enter(tenant: str) -> None:
        pipeline = next(pipelines)
        with ambient(tenant=tenant):
            await street.visit(tenant, lambda visit: pipeline.run(street.serve, visit))

    return enter


def asgi_door(street: Street, bulkhead: Bulkhead) -> Enter:
    """Give the way in through the middleware."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await street.serve(scope["state"]["visit"])
        await respond(send)

    guarded = ResilienceMiddleware(app, tenant="x-tenant-id", policies=[bulkhead])

    async def enter(tenant: str) -> None:
        async def request(visit: Visit) -> None:
            connection = Connection(headers=[(b"x-tenant-id", tenant.encode())])
            connection.scope["state"]["visit"] = visit
            await connection.run(guarded)
            if connection.error is not None:
                raise connection.error
            if connection.status == 429:
                raise BulkheadFullError("refused")

        await street.visit(tenant, request)

    return enter


@asynccontextmanager
async def saturating(
    enter: Enter, tenant: str, callers: int, *, warm_up: float = 20.0
) -> AsyncIterator[None]:
    """Let so many callers of a tenant each make one call after another, meanwhile.

    It begins after `warm_up`, when the releases of the first few calls have spread out.
    """

    async def again_and_again() -> None:
        while True:
            await enter(tenant)

    async with anyio.create_task_group() as group:
        for _ in range(callers):
            group.start_soon(again_and_again)
        await anyio.sleep(warm_up)
        yield
        group.cancel_scope.cancel()


async def offer(
    enter: Enter, tenant: str, *, arrivals: Arrivals, rate: float, calls: int, hold: float, random: Random
) -> None:
    """Make so many calls, `rate` a second on average, and wait until all are over."""
    async with anyio.create_task_group() as group:
        if arrivals == "closed loop":
            callers = math.ceil(rate * hold * 1.5)
            think = callers / rate - hold

            async def caller() -> None:
                for _ in range(calls // callers):
                    await anyio.sleep(random.expovariate(1 / think))
                    await enter(tenant)

            for _ in range(callers):
                group.start_soon(caller)
            return
        for _ in range(calls):
            between = random.expovariate(rate) if arrivals == "poisson" else random.uniform(0.9, 1.1) / rate
            await anyio.sleep(between)
            group.start_soon(enter, tenant)
