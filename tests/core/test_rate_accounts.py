"""Accounts of tenants, where sums of floats lose what is small beside what is large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.rate_accounts import Accounts

WEIGHTS = st.floats(min_value=1e-9, max_value=1e20, allow_nan=False)


@given(heavy=WEIGHTS, light=WEIGHTS, cost=st.floats(min_value=1e-3, max_value=1e6))
def test_who_is_left_goes_on_whatever_those_weighed_who_have_gone(
    heavy: float, light: float, cost: float
) -> None:
    accounts = Accounts[str]({"heavy": heavy, "light": light}.__getitem__)
    left, gone = accounts.join("light"), accounts.join("heavy")
    accounts.count_in("light", left)
    accounts.count_in("heavy", gone)
    accounts.count_out(gone)
    before = left.turn
    accounts.charge(left, cost)
    assert left.turn == before + cost / light
    accounts.count_in("light", left)
    assert accounts.who_makes_way("light", 1) is None
    assert accounts.who_makes_way("heavy", 1) in (None, "light")


def test_the_round_moves_on_no_faster_than_who_is_left_is_served() -> None:
    accounts = Accounts[str]({"heavy": 1e17, "light": 1.0}.__getitem__)
    left, gone = accounts.join("light"), accounts.join("heavy")
    accounts.count_in("light", left)
    accounts.count_in("heavy", gone)
    accounts.count_out(gone)
    for _ in range(3):
        accounts.charge(left, 1.0)
    assert 1.0 <= accounts.join("heavy").turn <= left.turn == 3.0
