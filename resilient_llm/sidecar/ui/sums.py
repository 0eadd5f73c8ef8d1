"""Counts of several rows, added up: of one tenant in several processes, or of all tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient_llm.sidecar.ui.shapes import Totals

__all__ = ["sums"]


def sums(rows: Sequence[Totals]) -> Totals:
    """Add up all that is counted, but for rates, which not every row has."""
    return {
        "in_flight": sum(row["in_flight"] for row in rows),
        "queued": sum(row["queued"] for row in rows),
        "requests": sum(row["requests"] for row in rows),
        "refused": sum(row["refused"] for row in rows),
        "errors": sum(row["errors"] for row in rows),
        "cancelled": sum(row["cancelled"] for row in rows),
        "input_tokens": sum(row["input_tokens"] for row in rows),
        "output_tokens": sum(row["output_tokens"] for row in rows),
        "cost_usd": sum(row["cost_usd"] for row in rows),
    }
