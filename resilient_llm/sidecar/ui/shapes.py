"""What the page is told, as values that JSON has: the shapes of a snapshot.

Workers send each other these, and the page's script reads them. Times are in milliseconds (those of a step from the
beginning of its call), moments in seconds since the epoch, and what is not known is `None`.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

__all__ = ["CallRow", "Snapshot", "StepRow", "TargetRow", "TenantRow", "Totals", "Trouble", "View"]


class StepRow(TypedDict):
    """One thing that a call went through; `kind` says what `facts` are about."""

    kind: str
    at: float
    took: float
    facts: dict[str, Any]


class CallRow(TypedDict):
    """A request that was answered, and what it went through on the way."""

    id: str
    ended: float
    notable: bool
    request_id: str
    method: str
    path: str
    tenant: str | None
    model: str | None
    target: str | None
    status: int | None
    outcome: str
    error: str | None
    took: float
    waited: float
    first_content: float | None
    attempts: int
    retries: int
    fallbacks: int
    hedges: int
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: float | None
    steps: list[StepRow]
    left_out: int


class Totals(TypedDict):
    """What came since the start; `in_flight` and `queued` are of now."""

    in_flight: int
    queued: int
    requests: int
    refused: int
    errors: int
    cancelled: int
    input_tokens: int
    output_tokens: int
    cost_usd: float
    per_second: NotRequired[float]


class TenantRow(Totals):
    """The same of one tenant; of requests that nobody's key came with, where `name` is `None`."""

    name: str | None


class TargetRow(TypedDict):
    """How one target is doing."""

    name: str
    models: list[str]
    healthy: bool
    circuit: str | None
    cooling_down: float
    in_flight: int
    limit: int | None
    attempts: int
    failures: int
    success_ratio: float
    first_token: float | None
    p50: float | None
    p95: float | None
    weight: float
    effective_weight: float
    share: NotRequired[float | None]


class Snapshot(TypedDict):
    """Everything there is to see at a moment; of several processes together, once merged."""

    version: str
    workers: int
    at: float
    started: float
    draining: bool
    open: bool
    """Whether there are no tenants, so that anybody may call."""
    running: int
    reload_error: str | None
    tenants: list[TenantRow]
    targets: list[TargetRow]
    calls: list[CallRow]


class Trouble(TypedDict):
    """A target that takes no calls now."""

    name: str
    circuit: str | None
    cooling_down: float


class View(TypedDict):
    """What one viewer sees of a snapshot: the first of what it asks for."""

    version: str
    workers: int
    at: float
    started: float
    draining: bool
    open: bool
    reload_error: str | None
    totals: Totals
    troubles: list[Trouble]
    tenants_all: int
    targets_all: int
    calls_all: int
    tenants_found: int
    targets_found: int
    calls_found: int
    tenants: list[TenantRow]
    targets: list[TargetRow]
    calls: list[CallRow]
