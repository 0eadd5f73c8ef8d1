"""Traffic through policies to a network, in virtual time, and a report of what became of it.

What runs is the library itself: its client door with the policies given, and clients that read every answer to its
end. Nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, Literal, cast

import anyio
import httpx

from resilient_llm._loop import EventLoop
from resilient_llm._options import at_least, function, instance_of, label, one_of, seconds
from resilient_llm.client import ClientDoor
from resilient_llm.context import ambient
from resilient_llm.errors import ConfigurationError, RejectedError
from resilient_llm.lab.arrivals import Arrivals, ClosedLoop
from resilient_llm.lab.distributions import distribution
from resilient_llm.lab.network import Network
from resilient_llm.lab.record import CallRecord
from resilient_llm.lab.report import Report, UpstreamReport
from resilient_llm.lab.traffic import Traffic
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.routing import Router
from resilient_llm.streams import BufferedStream, LibraryErrors
from resilient_llm.target import Target
from resilient_llm.telemetry.words import call_outcome
from resilient_llm.testing import run_virtual

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext, Policy
    from resilient_llm.lab.exchange import Exchange
    from resilient_llm.outcome import Outcome
    from resilient_llm.telemetry import Telemetry

__all__ = ["Gauges", "drive", "simulate"]

Gauges = Mapping[str, Callable[[], float]]
"""What to look at now and then while a simulation runs, by name: a limit, a queue, an open circuit."""


def simulate(
    policies: Sequence[Policy],
    network: Network,
    traffic: Arrivals | Traffic | Iterable[Traffic],
    *,
    calls: int | None = None,
    duration: float = math.inf,
    seed: int | str = 0,
    gauges: Gauges | None = None,
    sample_every: float = 1.0,
    telemetry: Telemetry | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> Report:
    """Carry out `calls` calls, or those that begin within `duration` seconds, and report on them when all have ended.

    `traffic` is what calls and when; arrivals alone stand for one tenant with requests of the usual kind. `gauges` are
    looked at every `sample_every` seconds.

    It runs in virtual time, on an event loop of its own. The same `seed` gives the same report: it also seeds the
    `random` of the policies. (On trio, where tasks of one instant run in any order, it does if no two things happen
    at the same time.) Raises `ConfigurationError` when neither `calls` nor `duration` is given, for options that cannot
    be, and when a call goes where no upstream is.
    """
    one_of(("asyncio", "trio"), backend=backend)
    return run_virtual(
        lambda: drive(
            policies,
            network,
            traffic,
            calls=calls,
            duration=duration,
            seed=seed,
            gauges=gauges,
            sample_every=sample_every,
            telemetry=telemetry,
        ),
        backend=backend,
    )


async def drive(
    policies: Sequence[Policy],
    network: Network,
    traffic: Arrivals | Traffic | Iterable[Traffic],
    *,
    calls: int | None = None,
    duration: float = math.inf,
    seed: int | str = 0,
    gauges: Gauges | None = None,
    sample_every: float = 1.0,
    telemetry: Telemetry | None = None,
) -> Report:
    """Do what `simulate` does, in the event loop that runs."""
    if calls is None and duration == math.inf:
        raise ConfigurationError("calls or duration must be given: the simulation would have no end")
    if calls is not None:
        at_least(1, calls=calls)
    seconds(duration=duration, infinite=True)
    seconds(sample_every=sample_every)
    instance_of(Network, network=network)
    if isinstance(policies, str | bytes) or not isinstance(policies, Sequence):
        raise ConfigurationError(f"policies={policies!r}: allowed are lists of policies, outermost first")
    watched = _watched(gauges)
    kinds = _listed(traffic)
    network.begin(seed)
    _seed(policies, f"{seed}")
    clients = _Clients(policies, network, math.inf if calls is None else calls, duration, telemetry)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in watched}
    try:
        async with anyio.create_task_group() as sampling:
            if watched:
                sampling.start_soon(_sample, watched, samples, sample_every)
            async with anyio.create_task_group() as callers:
                for number, one in enumerate(kinds):
                    callers.start_soon(clients.drive, one, f"{seed} {number}")
            sampling.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        mistake = _mistake(group)
        if mistake is None:
            raise
        raise mistake from None
    return clients.report(samples)


def _mistake(group: BaseExceptionGroup[BaseException]) -> ConfigurationError | None:
    """Give the mistake in what was asked for that ended the simulation, out of the groups that tasks raise."""
    for error in group.exceptions:
        found = _mistake(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, ConfigurationError):
            return found
    return None


class _Clients:
    """Make the calls, up to a number or a time, and keep a record of each."""

    def __init__(
        self,
        policies: Sequence[Policy],
        network: Network,
        calls: float,
        duration: float,
        telemetry: Telemetry | None,
    ) -> None:
        self._network = network
        self._clock = EventLoop.current().time
        self._began = self._clock()
        self._calls = calls
        self._duration = duration
        self._records: list[CallRecord] = []
        self._door = ClientDoor(
            network,
            synthesise=_synthesise,
            errors=LibraryErrors(timed_out=httpx.ReadTimeout, broken=httpx.RemoteProtocolError),
            policies=[_remember, *policies],
            name="lab",
            telemetry=telemetry,
        )

    async def drive(self, traffic: Traffic, seed: str) -> None:
        """Make the calls of one kind of traffic, until all have ended."""
        # Times are drawn apart from requests, so that neither changes with the other.
        times, requests = Random(f"{seed} times"), Random(f"{seed} requests")
        arrivals = traffic.arrivals
        with ambient(tenant=traffic.tenant, priority=traffic.priority):
            async with anyio.create_task_group() as group:
                if isinstance(arrivals, ClosedLoop):
                    await self._sleep_until(arrivals.start)
                    for _ in range(arrivals.workers):
                        group.start_soon(self._work, arrivals, traffic, times, requests)
                    return
                for at in arrivals.times(times):
                    if at >= self._duration or len(self._records) >= self._calls:
                        return
                    await self._sleep_until(at)
                    if len(self._records) >= self._calls:  # others have called meanwhile
                        return
                    record, request = self._begin(traffic, requests)
                    group.start_soon(self._call, traffic, record, request)

    async def _work(self, loop: ClosedLoop, traffic: Traffic, times: Random, requests: Random) -> None:
        think = distribution(loop.think)
        while len(self._records) < self._calls and self._now() < self._duration:
            record, request = self._begin(traffic, requests)
            await self._call(traffic, record, request)
            at_once = record.seconds == 0
            pause = loop.after_failure if at_once or not record.ok else 0.0
            await anyio.sleep(pause + think.draw(times))

    def _begin(self, traffic: Traffic, rng: Random) -> tuple[CallRecord, Request]:
        request = traffic.request(rng)
        record = CallRecord(
            number=len(self._records),
            tenant=traffic.tenant,
            model=str(request.json.get("model", "")),
            started=self._now(),
        )
        request.template = record  # rides along with every copy, for the network's log
        self._records.append(record)
        return record, request

    async def _call(self, traffic: Traffic, record: CallRecord, request: Request) -> None:
        """Make one call and read its answer to the end."""
        with ExitStack() as stack:
            if traffic.timeout is not None:
                stack.enter_context(ambient(timeout=traffic.timeout))
            try:
                reply = await self._door.handle(request)
                record.status = reply.status
                async for _ in reply.stream:
                    if record.first_token is None:
                        record.first_token = self._now()
                await reply.stream.aclose()
            except (httpx.TransportError, RejectedError):
                pass  # what it means is in the call's outcome
        record.ended = self._now()

    async def _sleep_until(self, at: float) -> None:
        await anyio.sleep(max(0.0, at - self._now()))

    def _now(self) -> float:
        return self._clock() - self._began

    def report(self, samples: Mapping[str, Sequence[tuple[float, float]]]) -> Report:
        """Bring together what clients and upstreams saw."""
        by_upstream: dict[str, list[Exchange]] = {name: [] for name in self._network.upstreams}
        for exchange in self._network.log:
            by_upstream[exchange.upstream].append(exchange)
            if isinstance(exchange.call, CallRecord):
                exchange.call.exchanges.append(exchange)
        return Report(
            calls=tuple(self._records),
            upstreams={
                name: UpstreamReport(
                    name=name, exchanges=exchanges, in_flight_max=self._network.serving[name].in_flight_max
                )
                for name, exchanges in by_upstream.items()
            },
            ended=self._now(),
            gauges=samples,
        )


async def _remember(call: Call, call_next: CallNext) -> Reply:
    """Note in a call's record how it ends."""
    record = call.request.template
    if isinstance(record, CallRecord):

        def ended(outcome: Outcome) -> None:
            record.outcome = call_outcome(call, outcome)
            record.error_type = outcome.error_type
            record.attempts = call.attempts

        call.on_finish(ended)
    return await call_next(call)


async def _sample(gauges: Gauges, samples: dict[str, list[tuple[float, float]]], every: float) -> None:
    began = anyio.current_time()
    while True:
        for name, gauge in gauges.items():
            samples[name].append((anyio.current_time() - began, float(gauge())))
        await anyio.sleep(every)


def _seed(policies: Iterable[object], seed: str) -> None:
    """Seed whatever the policies draw from: jitter, and choices among targets."""
    for number, policy in enumerate(policies):
        random = getattr(policy, "random", None)
        if isinstance(random, Random):
            random.seed(f"{seed} policy {number}")
        if isinstance(policy, Router):
            groups = policy.targets.values() if isinstance(policy.targets, Mapping) else [policy.targets]
            for group in groups:
                for target in [group] if isinstance(group, Target) else group:
                    _seed(target.policies, f"{seed} {target.name}")


def _synthesise(status: int, headers: Headers, body: bytes) -> Reply:
    return Reply(status, headers, BufferedStream([body]), native=body, complete=True)


def _listed(traffic: Arrivals | Traffic | Iterable[Traffic]) -> list[Traffic]:
    if isinstance(traffic, Traffic):
        return [traffic]
    if isinstance(traffic, ClosedLoop) or (hasattr(traffic, "times") and not isinstance(traffic, type)):
        return [Traffic(arrivals=cast("Arrivals", traffic))]
    listed = list(traffic) if isinstance(traffic, Iterable) and not isinstance(traffic, str | bytes) else []
    if not listed or not all(isinstance(one, Traffic) for one in listed):
        raise ConfigurationError(f"traffic={traffic!r}: allowed are arrivals, Traffic, and lists of Traffic")
    return listed


def _watched(gauges: Gauges | None) -> Gauges:
    instance_of(Mapping, none=True, gauges=gauges)
    for name, gauge in (gauges or {}).items():
        label(gauges=name)
        function(none=False, asynchronous=False, arguments=0, **{f"gauges[{name!r}]": gauge})
    return gauges or {}
