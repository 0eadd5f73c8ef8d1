"""The budget of hedges against counts of calls and hedges."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.hedge_budget import HedgeBudget

RATIOS = st.integers(0, 100).map(lambda hundredths: Fraction(hundredths, 100))


@given(ratio=RATIOS, burst=st.integers(1, 12), wants=st.lists(st.booleans(), max_size=200))
def test_hedges_are_a_share_of_calls_and_never_more(ratio: Fraction, burst: int, wants: list[bool]) -> None:
    budget = HedgeBudget(ratio=float(ratio), burst=burst)
    saved = Fraction(1)
    hedges: list[int] = []
    for want in wants:
        budget.deposit()
        saved = min(Fraction(burst), saved + ratio)
        assert budget.remaining == int(saved)
        hedged = want and budget.withdraw()
        assert hedged == (want and saved >= 1)
        saved -= hedged
        hedges.append(int(hedged))
    for begin in range(0, len(hedges), 7):
        assert sum(hedges[begin:]) <= ratio * len(hedges[begin:]) + burst
    assert sum(hedges) <= ratio * len(hedges) + 1


def test_none_without_calls_but_the_first() -> None:
    budget = HedgeBudget(ratio=0.05, burst=10)
    assert [budget.withdraw() for _ in range(3)] == [True, False, False]
    for _ in range(20):
        assert not budget.withdraw()
        budget.deposit()
    assert [budget.withdraw() for _ in range(2)] == [True, False]


def test_no_more_is_saved_than_the_burst() -> None:
    budget = HedgeBudget(ratio=0.5, burst=3)
    for _ in range(1000):
        budget.deposit()
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("ratio", "burst", "message"), [(-0.1, 1, "ratio=-0.1"), (1.1, 1, "ratio=1.1"), (0.1, 0, "burst=0")]
)
def test_options_are_checked(ratio: float, burst: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HedgeBudget(ratio=ratio, burst=burst)
