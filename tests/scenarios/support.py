"""How scenarios are set up: upstreams by name, a target for each, and what is asked of the reports."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import httpx

from resilient_llm import Policy, Reply, Target, Telemetry
from resilient_llm.client import ClientDoor
from resilient_llm.lab import URL, Chat, Network, Report, Upstream
from resilient_llm.message import Headers, Request
from resilient_llm.routing.balancers import (
    Balancer,
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)
from resilient_llm.routing.router import ANSWERED_BY
from resilient_llm.streams import BufferedStream, LibraryErrors

BALANCERS: Sequence[type[Balancer]] = (
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)


def url(name: str) -> str:
    return f"https://{name}.test/v1"


def target(name: str, *policies: Policy, **options: Any) -> Target:
    return Target(name=name, url=url(name), policies=policies, **options)


def network(**upstreams: Upstream) -> Network:
    """Make a network of upstreams, each where the target of its name sends requests."""
    return Network({url(name): upstream for name, upstream in upstreams.items()})


def times(report: Report, name: str) -> list[float]:
    """Give when requests came to an upstream."""
    return [round(at, 3) for at in report.upstreams[f"{name}.test"].times]


def requests(report: Report) -> dict[str, int]:
    """Count the requests that came to each upstream."""
    return {name.removesuffix(".test"): upstream.requests for name, upstream in report.upstreams.items()}


def share(report: Report, name: str) -> float:
    """Give the share of all requests that came to an upstream."""
    return report.upstreams[f"{name}.test"].requests / report.requests


def between(report: Report, name: str, start: float, end: float, *, every: float = 0.1) -> list[int]:
    """Count the requests that came to an upstream in each stretch of so many seconds."""
    upstream = report.upstreams[f"{name}.test"]
    count = round((end - start) / every)
    return [upstream.between(start + place * every, start + (place + 1) * every) for place in range(count)]


def answered_by(report: Report) -> dict[str, int]:
    """Count the answers that each upstream gave."""
    return {str(name).removesuffix(".test"): count for name, count in report.answered_by.items()}


class Caller:
    """A client of the library's client door over a network, for calls one by one."""

    def __init__(
        self, network: Network, *policies: Policy, url: str = URL, telemetry: Telemetry | None = None
    ) -> None:
        self.sent: list[Request] = []
        """What went out to the network, in order."""
        self._network = network
        self._url = url
        self._door = ClientDoor(
            self._send,
            synthesise=_synthesise,
            errors=LibraryErrors(timed_out=httpx.ReadTimeout, broken=httpx.RemoteProtocolError),
            policies=policies,
            on_rejection="raise",
            telemetry=telemetry,
        )

    async def __call__(self, *, headers: Sequence[tuple[bytes, bytes]] = (), **fields: object) -> Answer:
        """Make a call and read its answer to the end; refusals are raised."""
        request = Chat(fields=fields, url=self._url)(Random(0))
        reply = await self._door.handle(request.replace(headers=[*request.headers, *headers]))
        body = b"".join([chunk async for chunk in reply.stream])
        await reply.stream.aclose()
        told = {name.decode(): value.decode() for name, value in reply.headers}
        return Answer(reply.status, told.get(ANSWERED_BY.decode()), body)

    async def _send(self, request: Request) -> Reply:
        self.sent.append(request)
        return await self._network(request)


class Answer(NamedTuple):
    """What a caller got: the status, the target that it is from, and the body."""

    status: int
    target: str | None
    body: bytes


def _synthesise(status: int, headers: Headers, body: bytes) -> Reply:
    return Reply(status, headers, BufferedStream([body]), native=body, complete=True)
