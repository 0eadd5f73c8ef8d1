"""How much one tenant has asked for, and has under way.

Counts that go up, and two of the moment; no limit is decided by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient_llm.sidecar.ui.shapes import TenantRow

__all__ = ["Tally"]


class Tally:
    """Count the requests of one tenant since the start."""

    __slots__ = (
        "cancelled",
        "cost_usd",
        "errors",
        "input_tokens",
        "output_tokens",
        "refused",
        "requests",
        "running",
        "waiting",
    )

    def __init__(self) -> None:
        self.running = 0
        """Calls under way."""
        self.waiting = 0
        """Those of them that are with no provider: for a slot, a limit, a target, or between two attempts."""
        self.requests = 0
        self.refused = 0
        self.errors = 0
        self.cancelled = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self.cost_usd = 0.0

    def add(self, fields: Mapping[str, Any]) -> None:
        """Count a request by what the access log says of it."""
        self.requests += 1
        outcome = fields["outcome"]
        if outcome == "refused":
            self.refused += 1
        elif outcome == "error":
            self.errors += 1
        elif outcome == "cancelled":
            self.cancelled += 1
        self.input_tokens += fields.get("input_tokens") or 0
        self.output_tokens += fields.get("output_tokens") or 0
        self.cost_usd += fields.get("cost_usd") or 0.0

    def row(self, name: str | None) -> TenantRow:
        """Give the counts as the page wants them."""
        return {
            "name": name,
            "in_flight": self.running - self.waiting,
            "queued": self.waiting,
            "requests": self.requests,
            "refused": self.refused,
            "errors": self.errors,
            "cancelled": self.cancelled,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cost_usd": self.cost_usd,
        }
