"""A noisy neighbour once more, under a real server, over real sockets and in real time."""

from __future__ import annotations

from random import Random

import anyio
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from resilient_llm import Bulkhead
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.testing import serve
from tests.asgi.server import respond
from tests.fairness.traffic import Enter, Street, Visit, offer, p99, saturating
from tests.support import stalls

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

SLOTS = 10
HOLD = 0.2
RATE = 0.5 * SLOTS / 2 / HOLD  # half of what is quiet's share
JITTER = 0.04
"""What the machine, the sockets and the client may add, in seconds."""


def street_door(
    street: Street, bulkhead: Bulkhead, client: httpx.AsyncClient
) -> tuple[ResilienceMiddleware, Enter]:
    """Give an app behind a bulkhead, and the way in through a client."""
    visits: dict[str, Visit] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await street.serve(visits[scope["path"]])
        await respond(send)

    async def enter(tenant: str) -> None:
        async def request(visit: Visit) -> None:
            path = f"/{id(visit)}"
            visits[path] = visit
            response = await client.get(path, headers={"x-tenant-id": tenant})
            assert response.status_code == 200
            visit.ended = anyio.current_time()

        await street.visit(tenant, request)

    return ResilienceMiddleware(app, tenant="x-tenant-id", policies=[bulkhead]), enter


async def test_it_is_the_same_over_real_sockets() -> None:
    """Alone and beside fifty times its share at the same time, at two servers of one process; takes five seconds."""
    random = Random(1)
    unlimited = httpx.Limits(max_connections=None)
    streets = {name: Street(lambda _: random.uniform(0.75, 1.25) * HOLD) for name in ("alone", "beside")}
    spans: dict[str, tuple[float, float]] = {}

    async def run(name: str, callers: int) -> None:
        street = streets[name]
        bulkhead = Bulkhead(max_concurrent=SLOTS, shared=SLOTS, max_queued=300, max_wait=60.0)
        async with httpx.AsyncClient(limits=unlimited, timeout=60.0) as client:
            app, enter = street_door(street, bulkhead, client)
            async with serve(app) as base_url:
                client.base_url = httpx.URL(base_url)
                async with saturating(enter, "noisy", callers, warm_up=1.0):
                    began = anyio.current_time()
                    await offer(
                        enter, "quiet", arrivals="paced", rate=RATE, calls=40, hold=HOLD, random=Random(2)
                    )
                    spans[name] = began, anyio.current_time()

    async with stalls() as lost, anyio.create_task_group() as group:
        group.start_soon(run, "alone", 0)
        group.start_soon(run, "beside", 50 * SLOTS // 2)
    alone, beside = streets["alone"], streets["beside"]
    assert len(alone.served["quiet"]) == len(beside.served["quiet"]) == 40
    assert beside.peak == SLOTS
    assert len(beside.served["noisy"]) > SLOTS
    assert p99(beside.totals("quiet")) <= 2 * p99(alone.totals("quiet")) + lost.longest
    interval = beside.interval(*spans["beside"])
    assert p99(beside.waits("quiet")) <= p99(alone.waits("quiet")) + interval + JITTER + 2 * lost.longest
