"""A noisy neighbour once more, under a real server, over real sockets and in real time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import anyio
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
RATE = 0.5 * SLOTS / 2 / HOLD
"""Half of what is quiet's share, by callers who wait for their answers: fewer than its slots, so that it stays under
its share on a machine that takes its time, too."""
JITTER = 0.04
"""What the machine, the sockets and the client may add, in seconds."""


def street_door(street: Street, bulkhead: Bulkhead) -> tuple[ResilienceMiddleware, Callable[[str], Enter]]:
    """Give an app behind a bulkhead, and the way in over a connection for each call to a URL.

    A pool of connections would look at all of the 250 before each call, and that would be what is measured.
    """
    visits: dict[str, Visit] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await street.serve(visits[scope["path"]])
        await respond(send)

    def way_in(base_url: str) -> Enter:
        host, _, port = base_url.removeprefix("http://").partition(":")

        async def enter(tenant: str) -> None:
            async def request(visit: Visit) -> None:
                path = f"/{id(visit)}"
                visits[path] = visit
                head = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nx-tenant-id: {tenant}\r\nconnection: close\r\n\r\n"
                async with await anyio.connect_tcp(host, int(port)) as connection:
                    await connection.send(head.encode())
                    received = b"".join([part async for part in connection])
                assert received.startswith(b"HTTP/1.1 200 "), received
                visit.ended = anyio.current_time()

            await street.visit(tenant, request)

        return enter

    return ResilienceMiddleware(app, tenant="x-tenant-id", policies=[bulkhead]), way_in


async def test_it_is_the_same_over_real_sockets() -> None:
    """Alone and beside fifty times its share at the same time, at two servers of one process; takes five seconds."""
    random = Random(1)
    streets = {name: Street(lambda _: random.uniform(0.75, 1.25) * HOLD) for name in ("alone", "beside")}
    spans: dict[str, tuple[float, float]] = {}

    async def run(name: str, callers: int) -> None:
        street = streets[name]
        bulkhead = Bulkhead(max_concurrent=SLOTS, shared=SLOTS, max_queued=300, max_wait=60.0)
        app, way_in = street_door(street, bulkhead)
        async with serve(app) as base_url:
            enter = way_in(base_url)
            async with saturating(enter, "noisy", callers, warm_up=1.0):
                began = anyio.current_time()
                await offer(
                    enter, "quiet", arrivals="closed loop", rate=RATE, calls=40, hold=HOLD, random=Random(2)
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
