"""The promise of `RateLimit` at scale: 5,000 items at once, hardly a 429, and the provider's limit used."""

from __future__ import annotations

from benchmarks.five_thousand import measure
from resilient_llm.testing import run_virtual


def test_five_thousand_items_at_once() -> None:
    figures = run_virtual(measure, "RateLimit", 5_000, 0)
    assert figures.throttled_ratio < 0.003
    assert figures.used_ratio > 0.95
    assert figures.failed == 0
