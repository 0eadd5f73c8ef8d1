"""What one viewer sees of a snapshot: the first few of those it looks for, in the order it wants.

Of a thousand tenants a page shows fifty; which, is worked out here, so that a browser gets no more than it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from resilient_llm.sidecar.ui.shapes import CallRow, Snapshot, TargetRow, TenantRow, Totals, Trouble, View
from resilient_llm.sidecar.ui.sums import sums

__all__ = ["SHOWN", "Query", "view"]

SHOWN = 50
"""Rows of each list."""

_MAX_FILTER = 100


def _busiest_tenant(row: TenantRow) -> tuple[float, ...]:
    return row["in_flight"] + row["queued"], row.get("per_second", 0.0), row["requests"]


def _busiest_target(row: TargetRow) -> tuple[float, ...]:
    return row["in_flight"], row.get("share") or 0.0, row["attempts"]


_CIRCUITS = {None: 0, "closed": 0, "half_open": 1, "open": 2, "isolated": 3}

_TENANT_ORDERS: Mapping[str, Callable[[TenantRow], Any]] = {
    "busiest": _busiest_tenant,
    "queued": lambda row: row["queued"],
    "requests": lambda row: row["requests"],
    "refused": lambda row: row["refused"],
    "errors": lambda row: row["errors"],
    "tokens": lambda row: row["input_tokens"] + row["output_tokens"],
    "spend": lambda row: row["cost_usd"],
}
_TARGET_ORDERS: Mapping[str, Callable[[TargetRow], Any]] = {
    "busiest": _busiest_target,
    "circuit": lambda row: (not row["healthy"], _CIRCUITS.get(row["circuit"], 0), row["cooling_down"]),
    "success": lambda row: -row["success_ratio"],
    "latency": lambda row: row["p95"] or 0.0,
    "share": lambda row: row.get("share") or 0.0,
    "weight": lambda row: row["effective_weight"],
}
_BY_NAME = "name"


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a viewer looks for: parts of names, orders, and whether only calls that are worth a look."""

    tenant: str = ""
    target: str = ""
    call: str = ""
    tenants_by: str = _BY_NAME
    targets_by: str = _BY_NAME
    notable: bool = False

    @classmethod
    def parse(cls, query_string: bytes) -> Query:
        """Read it from the query of a URL; what is not known there is as if it was not given."""
        given = parse_qs(query_string[:4096].decode("ascii", "replace"))
        one = {name: values[0][:_MAX_FILTER] for name, values in given.items()}
        return cls(
            tenant=one.get("tenant", "").casefold().strip(),
            target=one.get("target", "").casefold().strip(),
            call=one.get("call", "").casefold().strip(),
            tenants_by=_known(one.get("tenants_by"), _TENANT_ORDERS),
            targets_by=_known(one.get("targets_by"), _TARGET_ORDERS),
            notable="notable" in one,
        )


def _known(order: str | None, orders: Mapping[str, object]) -> str:
    return order if order in orders and order is not None else _BY_NAME


def view(snapshot: Snapshot, query: Query) -> View:
    """Give what a viewer sees."""
    tenants = [row for row in snapshot["tenants"] if query.tenant in (row["name"] or "").casefold()]
    targets = [
        row
        for row in snapshot["targets"]
        if not query.target or any(query.target in name.casefold() for name in (row["name"], *row["models"]))
    ]
    calls = [
        row
        for row in snapshot["calls"]
        if (row["notable"] or not query.notable) and (not query.call or query.call in _words(row))
    ]
    found = len(tenants)
    tenants.sort(key=_named)
    targets.sort(key=lambda row: row["name"].casefold())
    if (by_tenant := _TENANT_ORDERS.get(query.tenants_by)) is not None:
        tenants.sort(key=by_tenant, reverse=True)
    elif len(tenants) > SHOWN:  # by name, but of those that matter
        tenants = sorted(sorted(tenants, key=_busiest_tenant, reverse=True)[:SHOWN], key=_named)
    if (by_target := _TARGET_ORDERS.get(query.targets_by)) is not None:
        targets.sort(key=by_target, reverse=True)
    return {
        "version": snapshot["version"],
        "workers": snapshot["workers"],
        "at": snapshot["at"],
        "started": snapshot["started"],
        "draining": snapshot["draining"],
        "open": snapshot["open"],
        "reload_error": snapshot["reload_error"],
        "totals": _totals(snapshot["tenants"]),
        "troubles": [_trouble(row) for row in snapshot["targets"] if not row["healthy"]][:SHOWN],
        "tenants_all": len(snapshot["tenants"]),
        "targets_all": len(snapshot["targets"]),
        "calls_all": len(snapshot["calls"]),
        "tenants_found": found,
        "targets_found": len(targets),
        "calls_found": len(calls),
        "tenants": tenants[:SHOWN],
        "targets": targets[:SHOWN],
        "calls": calls[:SHOWN],
    }


def _totals(rows: list[TenantRow]) -> Totals:
    return {**sums(rows), "per_second": sum(row.get("per_second", 0.0) for row in rows)}


def _trouble(row: TargetRow) -> Trouble:
    return {"name": row["name"], "circuit": row["circuit"], "cooling_down": row["cooling_down"]}


def _named(row: TenantRow) -> tuple[bool, str]:
    return row["name"] is None, (row["name"] or "").casefold()


def _words(row: CallRow) -> str:
    words = (
        row["tenant"],
        row["model"],
        row["target"],
        row["outcome"],
        row["error"],
        row["request_id"],
        row["path"],
    )
    return " ".join(word for word in words if word).casefold()
