"""What there is to see at a moment, of one process and of several together.

Copies of what others know; nothing is kept, and nothing is left out but what `Recent` has forgotten.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import resilient_llm
from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.sidecar.ui.sums import sums

if TYPE_CHECKING:
    from resilient_llm.routing.health import TargetHealth
    from resilient_llm.sidecar.app import Sidecar
    from resilient_llm.sidecar.desk import Desk
    from resilient_llm.sidecar.ui.shapes import CallRow, Snapshot, TargetRow, TenantRow

__all__ = ["SNAPSHOT", "NothingToSeeError", "merge", "snapshot", "taking_from"]

SNAPSHOT = "/admin/snapshot"
"""Where a desk gives a snapshot, of its process or of all that it stands for."""

_WORST = [None, *(state.value for state in (CircuitState.CLOSED, CircuitState.HALF_OPEN, CircuitState.OPEN))]
_WORST.append(CircuitState.ISOLATED.value)

Row = TypeVar("Row", "TargetRow", "TenantRow")


def snapshot(sidecar: Sidecar, *, started: float, reload_error: str | None = None) -> Snapshot:
    """Say how a sidecar, which has run since `started`, and everything in it is doing now."""
    setup, recent = sidecar.setup, sidecar.recent
    tenants = dict.fromkeys(setup.config.tenants)
    rows: dict[str, TargetRow] = {}
    for health in setup.router.health().targets:
        if health.name in rows:  # one that answers for several models is one target
            rows[health.name]["models"].append(health.model)
        else:
            rows[health.name] = _target(health)
    for router in setup.alone.values():
        for health in router.health().targets:
            row = rows.get(health.name)
            if row is None:
                rows[health.name] = _target(health)
            else:  # it is asked by its name, too, and has one limit for both
                rows[health.name] = {**_targets([row, _target(health)]), "limit": row["limit"]}
    return {
        "version": resilient_llm.__version__,
        "workers": 1,
        "at": time.time_ns() / 1e9,
        "started": started,
        "draining": sidecar.draining,
        "open": not tenants,
        "running": sidecar.running,
        "reload_error": reload_error,
        "tenants": []
        if recent is None
        else [
            recent.tally(name).row(name)
            for name in (*recent.tenants, *tenants.keys() - recent.tenants.keys())
        ],
        "targets": list(rows.values()),
        "calls": [] if recent is None else recent.calls(),
    }


def _target(health: TargetHealth) -> TargetRow:
    latency = health.latency
    return {
        "name": health.name,
        "models": [health.model],
        "healthy": health.healthy,
        "circuit": health.circuit,
        "cooling_down": health.cooling_down * 1e3,
        "in_flight": health.in_flight,
        "limit": health.limit,
        "attempts": health.attempts,
        "failures": health.failures,
        "success_ratio": health.success_ratio,
        "first_token": _ms(health.time_to_first_token),
        "p50": None if latency is None else _ms(latency.p50),
        "p95": None if latency is None else _ms(latency.p95),
        "weight": health.weight,
        "effective_weight": health.effective_weight,
    }


class NothingToSeeError(Exception):
    """Nobody says how things are: all workers are being started again."""


def taking_from(desk: Desk) -> Callable[[], Awaitable[Snapshot]]:
    """Give what asks a desk for a snapshot; it raises `NothingToSeeError` when there is none."""

    async def take() -> Snapshot:
        status, _headers, body = await desk.answer("GET", SNAPSHOT, b"")
        if status != 200:
            raise NothingToSeeError
        taken: Snapshot = json.loads(body)
        return taken

    return take


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Make one of those of several processes; there must be one.

    What is counted is added up. Of the rest each process has its own view: a ratio, a weight and a median are
    averaged by attempts, and of circuits and the slowest the worst is told.
    """
    first, *others = snapshots
    if not others:
        return first
    reload_errors = (one["reload_error"] for one in snapshots)
    return {
        "version": first["version"],
        "workers": sum(one["workers"] for one in snapshots),
        "at": max(one["at"] for one in snapshots),
        "started": min(one["started"] for one in snapshots),
        "draining": any(one["draining"] for one in snapshots),
        "open": first["open"],
        "running": sum(one["running"] for one in snapshots),
        "reload_error": next((error for error in reload_errors if error is not None), None),
        "tenants": _by_name((one["tenants"] for one in snapshots), _tenants),
        "targets": _by_name((one["targets"] for one in snapshots), _targets),
        "calls": sorted((row for one in snapshots for row in one["calls"]), key=_ended, reverse=True),
    }


def _by_name(lists: Iterable[list[Row]], join: Callable[[list[Row]], Row]) -> list[Row]:
    found: dict[str | None, list[Row]] = {}
    for rows in lists:
        for row in rows:
            found.setdefault(row["name"], []).append(row)
    return [join(rows) for rows in found.values()]


def _tenants(rows: list[TenantRow]) -> TenantRow:
    return {"name": rows[0]["name"], **sums(rows)}


def _targets(rows: list[TargetRow]) -> TargetRow:
    limits = [row["limit"] for row in rows if row["limit"] is not None]
    return {
        "name": rows[0]["name"],
        "models": list(dict.fromkeys(model for row in rows for model in row["models"])),
        "healthy": all(row["healthy"] for row in rows),
        "circuit": max((row["circuit"] for row in rows), key=_WORST.index),
        "cooling_down": max(row["cooling_down"] for row in rows),
        "in_flight": sum(row["in_flight"] for row in rows),
        "limit": sum(limits) if limits else None,
        "attempts": sum(row["attempts"] for row in rows),
        "failures": sum(row["failures"] for row in rows),
        "success_ratio": _mean(rows, "success_ratio") or 0.0,
        "first_token": _mean(rows, "first_token"),
        "p50": _mean(rows, "p50"),
        "p95": max((p95 for row in rows if (p95 := row["p95"]) is not None), default=None),
        "weight": rows[0]["weight"],
        "effective_weight": _mean(rows, "effective_weight") or 0.0,
    }


def _mean(rows: Sequence[Any], column: str) -> float | None:
    """Give the mean of those that know it, each counting as often as it was asked, and once more."""
    known = [(row["attempts"] + 1, row[column]) for row in rows if row[column] is not None]
    return sum(times * value for times, value in known) / sum(times for times, _ in known) if known else None


def _ended(row: CallRow) -> float:
    return row["ended"]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
