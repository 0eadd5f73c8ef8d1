"""Accounts beside a model that keeps every single amount, and periods."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from resilient_llm.core.budget import Account, Amount, BudgetLevel, Cap, Decision, Reservation
from resilient_llm.core.period import RollingPeriod

DAY = RollingPeriod("day", 86_400.0, 24)
HOUR = 3_600.0


def usd(limit: float, warn_ratio: float = math.inf) -> list[Cap]:
    return [Cap("usd", DAY, limit, warn_ratio)]


def level(account: Account, caps: list[Cap], now: float) -> BudgetLevel:
    [only] = account.levels(caps, now)
    return only


def spend(account: Account, amount: float, now: float, limit: float = 100) -> Decision:
    decision = account.reserve("key", Amount(amount), usd(limit), now)
    if decision.reservation is not None:
        account.settle(decision.reservation.amount, Amount(amount), now)
    return decision


@given(now=st.floats(0, 1e9), slices=st.integers(1, 100), duration=st.floats(1, 1e7))
def test_a_moment_lies_in_its_slice(now: float, slices: int, duration: float) -> None:
    at = RollingPeriod("day", duration, slices).at(now)
    width = duration / slices
    assert at.kept == slices + 1
    assert 0 <= at.ends_in <= width * (1 + 1e-6) + 1e-6
    assert at.slice * width <= now * (1 + 1e-12)


def test_what_is_reserved_counts_until_it_is_settled_or_refunded() -> None:
    account = Account()
    first = account.reserve("key", Amount(6), usd(10), 0)
    assert first.reservation is not None
    second = account.reserve("key", Amount(5), usd(10), 0)
    assert second.reservation is None
    assert second.refused == BudgetLevel("usd_per_day", 10, 0, 6, 0, 0)
    account.settle(Amount(6), Amount(1), 0)
    third = account.reserve("key", Amount(5), usd(10), 0)
    assert third.reservation is not None
    account.refund(Amount(5))
    assert level(account, usd(10), 0)[1:5] == (10, 1, 0, 0)
    assert account.outstanding == 0


def test_what_is_spent_comes_back_after_a_day_and_at_most_an_hour() -> None:
    account = Account()
    spend(account, 10, 0.5 * HOUR, 10)
    assert spend(account, 1, 24.4 * HOUR, 10).refused
    decision = spend(account, 1, 24.6 * HOUR, 10)
    assert decision.refused
    assert decision.retry_after == pytest.approx(0.4 * HOUR)
    assert spend(account, 1, 25 * HOUR, 10).refused is None


def test_retry_after_is_when_enough_has_come_back() -> None:
    account = Account()
    for hour in range(4):
        spend(account, 2.5, hour * HOUR, 10)
    for wanted, hour in ((1, 25), (2.5, 25), (3, 26), (10, 28)):
        decision = account.reserve("key", Amount(wanted), usd(10), 4 * HOUR)
        assert decision.retry_after == pytest.approx((hour - 4) * HOUR)
    assert account.reserve("key", Amount(11), usd(10), 4 * HOUR).retry_after is None  # never


def test_what_only_calls_in_flight_are_in_the_way_of_is_worth_a_quick_look() -> None:
    account = Account()
    account.reserve("key", Amount(10), usd(10), 0)
    assert account.reserve("key", Amount(1), usd(10), 0).retry_after == 1


def test_all_caps_or_none() -> None:
    caps = [
        Cap("usd", DAY, 10),
        Cap("tokens", DAY, 1_000),
        Cap("usd", RollingPeriod("month", 30 * 86_400.0, 30), 12),
    ]
    account = Account()
    refused = account.reserve("key", Amount(1, 2_000), caps, 0)
    assert (refused.reservation, account.reserved) == (None, Amount())
    assert refused.refused is not None
    assert refused.refused.name == "tokens_per_day"
    account.settle(Amount(), Amount(10, 500), 0)
    account.outstanding = 0
    decision = account.reserve("key", Amount(3, 1), caps, 1)
    assert decision.refused is not None
    assert decision.refused.name == "usd_per_month"  # of those in the way the one that takes longest
    assert [level.remaining for level in decision.levels] == [0, 500, 2]


def test_overspending_is_a_debt() -> None:
    account = Account()
    account.reserve("key", Amount(1), usd(10), 0)
    account.settle(Amount(1), Amount(15), 0)
    assert level(account, usd(10), 0).remaining == -5
    assert account.reserve("key", Amount(0), usd(10), 0).refused
    assert account.reserve("key", Amount(0), usd(16), 0).refused is None


def test_who_reserves_nothing_passes_until_all_is_spent() -> None:
    account = Account()
    for amount, refused in ((9.0, False), (1.0, True)):
        spend(account, amount, 0, 10)
        assert (account.reserve("key", Amount(0), usd(10), 0).refused is not None) == refused


def test_without_enforcing_everything_is_counted() -> None:
    account = Account()
    decision = account.reserve("key", Amount(15), usd(10), 0, enforce=False)
    assert decision.reservation is not None
    assert decision.refused is not None
    assert account.reserved == Amount(15)


def test_a_warning_is_given_once_each_time_it_is_crossed() -> None:
    account, caps = Account(), usd(10, 0.8)
    crossed = []
    for hour in (*range(10), *range(40, 50)):
        decision = account.reserve("key", Amount(1), caps, hour * HOUR)
        crossed += [hour for level in decision.crossed if level.name == "usd_per_day"]
        account.settle(Amount(1), Amount(1), hour * HOUR)
    assert crossed == [8, 48]


def test_estimates_are_marked() -> None:
    account = Account()
    for estimated in (True, False):
        account.reserve("key", Amount(2), usd(10), 0)
        account.settle(Amount(2), Amount(2), 0, estimated=estimated)
    assert level(account, usd(10), 0) == BudgetLevel("usd_per_day", 10, 4, 0, 2, 25 * HOUR)


def test_an_account_is_idle_when_a_new_one_would_answer_the_same() -> None:
    account = Account()
    assert account.idle(0)
    decision = account.reserve("key", Amount(1), usd(10), 0)
    assert not account.idle(100 * HOUR)
    assert decision.reservation is not None
    account.settle(Amount(1), Amount(1), 0)
    assert not account.idle(24 * HOUR)
    assert account.idle(25 * HOUR)


def test_ten_dimes_are_a_dollar() -> None:
    account = Account()
    assert [spend(account, 0.1, 0, limit=1.0).refused for _ in range(10)] == [None] * 10
    assert spend(account, 0.1, 0, limit=1.0).refused


def test_a_clock_that_goes_back_loses_nothing() -> None:
    account = Account()
    spend(account, 5, 100 * HOUR)
    spend(account, 5, 2 * HOUR)
    assert level(account, usd(100), 101 * HOUR).spent == 10


def test_memory_is_small_and_bounded() -> None:
    account = Account()
    for minute in range(10_000):
        spend(account, 0.001, minute * 60)
    [spending] = account._spendings.values()
    assert isinstance(spending._slices, array)
    assert len(spending._slices) == 25 * 5


class AccountMachine(RuleBasedStateMachine):
    """Beside the account: a list of everything spent and reserved."""

    PERIODS = (RollingPeriod("day", 100.0, 10), RollingPeriod("month", 1_000.0, 10))

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.account = Account()
        self.spent: list[tuple[float, Amount]] = []
        self.held: list[Reservation] = []
        self.caps: list[Cap] = []

    @initialize(day=st.sampled_from([10.0, 50.0]), month=st.sampled_from([60.0, math.inf]))
    def begin(self, day: float, month: float) -> None:
        self.caps = [
            Cap("usd", self.PERIODS[0], day),
            Cap("tokens", self.PERIODS[0], 40.0),
            Cap("usd", self.PERIODS[1], month),
        ]

    def counting(self, cap: Cap, *, at_least: bool) -> float:
        """What counts for sure, or what may count, for as long as a slice is forgotten late."""
        period = cap.period
        assert isinstance(period, RollingPeriod)
        since = self.now - period.duration - (0.0 if at_least else period.duration / period.slices)
        return sum(amount.of(cap.unit) for at, amount in self.spent if at > since)

    def reserved(self, cap: Cap) -> float:
        return sum(reservation.amount.of(cap.unit) for reservation in self.held)

    @rule(dollars=st.sampled_from([0.0, 1.0, 3.0, 20.0]), tokens=st.sampled_from([0.0, 5.0, 15.0]))
    def reserve(self, dollars: float, tokens: float) -> None:
        amount = Amount(dollars, tokens)
        decision = self.account.reserve("key", amount, self.caps, self.now)
        if decision.reservation is not None:
            for cap in self.caps:
                total = self.counting(cap, at_least=True) + self.reserved(cap) + amount.of(cap.unit)
                spent_over = self.counting(cap, at_least=True) + self.reserved(cap) >= cap.limit
                assert total <= cap.limit * (1 + 1e-6) or (amount.of(cap.unit) == 0 and not spent_over)
            self.held.append(decision.reservation)
        else:
            blocked = [
                cap
                for cap in self.caps
                if self.counting(cap, at_least=False) + self.reserved(cap) + amount.of(cap.unit)
                > cap.limit * (1 - 1e-6)
            ]
            assert blocked, "refused, though all that may count leaves room"
            assert decision.refused is not None
            # When calls that run will be settled nobody knows: of what they hold nothing is promised.
            held = any(self.reserved(cap) + amount.of(cap.unit) > cap.limit for cap in self.caps)
            if decision.retry_after is not None and decision.retry_after != 1.0 and not held:
                later = self.now + decision.retry_after + 1e-6
                copy = self.copy()
                again = copy.reserve("key", amount, self.caps, later)
                assert again.reservation is not None, "it did not come back when it was said to"

    def copy(self) -> Account:
        """The same account, made from all that was ever done to it."""
        copy = Account(self.PERIODS)
        for at, amount in self.spent:
            copy.outstanding += 1
            copy.settle(Amount(), amount, at)
        for reservation in self.held:
            copy.reserve("key", reservation.amount, self.caps, self.now, enforce=False)
        return copy

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0]), estimated=st.booleans())
    def settle(self, data: st.DataObject, share: float, estimated: bool) -> None:
        if self.held:
            reservation = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            spent = Amount(reservation.amount.usd * share, reservation.amount.tokens * share)
            self.account.settle(reservation.amount, spent, self.now, estimated=estimated)
            self.spent.append((self.now, spent))

    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        if self.held:
            reservation = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.account.refund(reservation.amount)

    @rule(seconds=st.sampled_from([0.5, 5.0, 33.0, 120.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def never_more_than_the_cap_is_spent_and_reserved(self) -> None:
        for cap in self.caps:
            total = self.counting(cap, at_least=True) + self.reserved(cap)
            assert total <= cap.limit * (1 + 1e-6)

    @invariant()
    def levels_lie_between_what_counts_for_sure_and_what_may(self) -> None:
        for cap, level in zip(self.caps, self.account.levels(self.caps, self.now), strict=True):
            low, high = self.counting(cap, at_least=True), self.counting(cap, at_least=False)
            assert low - 1e-6 <= level.spent <= high + 1e-6
            assert level.reserved == pytest.approx(self.reserved(cap), abs=1e-6)
            assert level.estimated <= level.spent + 1e-6
            assert self.account.remaining(cap, self.now) == pytest.approx(level.remaining)

    @invariant()
    def nothing_outstanding_is_nothing_reserved(self) -> None:
        assert self.account.outstanding == len(self.held)
        if not self.held:
            assert self.account.reserved == Amount()


TestAccount = AccountMachine.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=40)
