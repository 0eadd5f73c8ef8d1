"""How the targets of a router are doing, as a plain object and as JSON.

A report is a copy of what is known at a moment; nothing is decided by it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.policies.concurrency_limit import ConcurrencyLimit

if TYPE_CHECKING:
    from resilient_llm.policies.circuit_breaker import CircuitBreaker
    from resilient_llm.routing.deployment import Deployment
    from resilient_llm.routing.route import Group
    from resilient_llm.target import Target

__all__ = [
    "CredentialReport",
    "Durations",
    "Health",
    "Latency",
    "TargetHealth",
    "circuits_of",
    "report",
]

_WINDOW = 1024
_WORST = (CircuitState.ISOLATED, CircuitState.OPEN, CircuitState.HALF_OPEN, CircuitState.CLOSED)


class Durations:
    """Keep how long the last 1,024 attempts took that succeeded, in seconds."""

    __slots__ = ("_durations", "_next")

    def __init__(self) -> None:
        self._durations: list[float] = []
        self._next = 0

    def add(self, duration: float) -> None:
        """Take one, in place of the oldest."""
        if len(self._durations) < _WINDOW:
            self._durations.append(duration)
        else:
            self._durations[self._next] = duration
            self._next = (self._next + 1) % _WINDOW

    @property
    def values(self) -> Sequence[float]:
        """Give them, in no order."""
        return self._durations


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Say how long attempts took that succeeded, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialReport:
    """Say how one of a target's credentials is."""

    name: str
    state: str
    """living, resting (throttled), set_aside (refused) or half_open (one call at a time tries it again)."""
    in_flight: int
    back_in: float
    """Seconds until it is used again; 0 unless it rests or is set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHealth:
    """Say how one target is doing; what is not known yet is `None`."""

    name: str
    model: str
    """The logical model it answers for."""
    healthy: bool
    """Whether it may be asked now, as far as its circuit, its credentials and what it has said go."""
    circuit: str | None
    """closed, half_open, open or isolated, the worst of those it has; isolated too when it was set aside itself."""
    in_flight: int
    attempts: int
    failures: int
    """Attempts that failed, those that found a credential dead among them."""
    success_ratio: float
    """Of late: what is long past counts for little."""
    time_to_first_token: float | None
    """Of late, smoothed, in seconds."""
    latency: Latency | None
    cooling_down: float
    """Seconds until it may be asked again after it was throttled."""
    credentials: Sequence[CredentialReport]
    weight: float
    effective_weight: float
    """What is left of `weight` after failures of late, or while it starts slowly."""
    limit: int | None
    """Attempts that may be in flight at once, by the lowest of its own concurrency limits."""
    by_hand: Sequence[str]
    """What somebody has changed of it: isolated, weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Say how a router's targets are doing, together and one by one."""

    attempts: int
    failures: int
    success_ratio: float | None
    latency: Latency | None
    targets: Sequence[TargetHealth]

    def to_json(self, *, indent: int | None = None) -> str:
        """Give the report as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=indent, allow_nan=False)


def report(groups: Iterable[Group], shared: Sequence[CircuitBreaker], now: float) -> Health:
    """Make the report of groups of targets, whose attempts pass the `shared` circuits too."""
    groups = list(groups)
    targets = [
        _of(deployment, group.model, shared, now)
        for group in groups
        for deployment in group.deployments.values()
    ]
    # One that answers for several models counts once.
    deployments = {deployment for group in groups for deployment in group.deployments.values()}
    durations = [duration for deployment in deployments for duration in deployment.durations.values]
    attempts = sum(deployment.attempts for deployment in deployments)
    failures = sum(deployment.failures for deployment in deployments)
    return Health(
        attempts=attempts,
        failures=failures,
        success_ratio=None if not attempts else 1 - failures / attempts,
        latency=_latency(durations),
        targets=tuple(targets),
    )


def _of(deployment: Deployment, model: str, shared: Sequence[CircuitBreaker], now: float) -> TargetHealth:
    target, load, pool = deployment.target, deployment.load, deployment.credentials
    states = {
        state
        for breaker in (*deployment.circuits, *shared)
        for state in circuits_of(breaker, target.name).values()
    }
    if deployment.isolated:
        states.add(CircuitState.ISOLATED)
    circuit = next((state for state in _WORST if state in states), None)
    cooling = max(0.0, deployment.cooling.until - now)
    return TargetHealth(
        name=target.name,
        model=model,
        healthy=not cooling
        and circuit not in (CircuitState.OPEN, CircuitState.ISOLATED)
        and (pool is None or pool.is_usable(now)),
        circuit=None if circuit is None else circuit.value,
        in_flight=load.in_flight,
        attempts=deployment.attempts,
        failures=deployment.failures,
        success_ratio=load.success_ratio(now),
        time_to_first_token=load.latency(now),
        latency=_latency(deployment.durations.values),
        cooling_down=cooling,
        credentials=()
        if pool is None
        else tuple(
            CredentialReport(
                name=key.name, state=one.state.value, in_flight=one.in_flight, back_in=one.back_in
            )
            for key, one in zip(target.credentials, pool.health(now), strict=True)
        ),
        weight=load.weight,
        effective_weight=load.effective_weight(now),
        limit=_limit(target),
        by_hand=(
            *(("isolated",) if deployment.isolated else ()),
            *(("weight",) if load.weight != target.weight else ()),
        ),
    )


def circuits_of(breaker: CircuitBreaker, name: str) -> dict[Hashable, CircuitState]:
    """Give the circuits that a breaker has for a target, by their keys."""
    return {key: breaker.state(key) for key in breaker.keys_of(name)}


def _limit(target: Target) -> int | None:
    limits = [
        limit
        for policy in target.policies
        if isinstance(policy, ConcurrencyLimit)
        for limit in map(policy.limit, policy.keys_of(target.name))
    ]
    return min(limits, default=None)


def _latency(durations: Sequence[float]) -> Latency | None:
    if not durations:
        return None
    ordered = sorted(durations)

    def percentile(ratio: float) -> float:
        return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)]  # the nearest rank

    return Latency(
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(0.5),
        p95=percentile(0.95),
        p99=percentile(0.99),
    )
