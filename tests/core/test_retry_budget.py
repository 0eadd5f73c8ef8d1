"""Retry budget: against a naive model that remembers every call and every retry."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilient_llm.core.retry_budget import RetryBudget


class NaiveBudget:
    """Keep every event with its exact time; count them anew for each question."""

    def __init__(self, *, ratio: float, min_per_second: float, ttl: float) -> None:
        self.ratio = ratio
        self.reserve = min_per_second * ttl
        self.ttl = ttl
        self.calls: list[float] = []
        self.retries: list[float] = []

    def most(self, now: float) -> float:
        """Balance if both kinds of event count for exactly `ttl`: no grant may exceed this."""
        calls = sum(now - self.ttl < at <= now for at in self.calls)
        retries = sum(now - self.ttl < at <= now for at in self.retries)
        return self.reserve + self.ratio * calls - retries

    def least(self, now: float) -> float:
        """Balance if calls expire a tenth early and retries a tenth late: this much must be had."""
        calls = sum(now - self.ttl * 0.9 <= at <= now for at in self.calls)
        retries = sum(now - self.ttl * 1.1 <= at <= now for at in self.retries)
        return self.reserve + self.ratio * calls - retries


class BudgetMachine(RuleBasedStateMachine):
    """Time moves in sixteenths of a second, so that all sums here are exact."""

    @initialize(
        ratio=st.sampled_from([0.0, 0.125, 0.2, 0.5, 1.0]),
        min_per_second=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        ttl=st.sampled_from([2.5, 5.0, 10.0, 40.0]),
        start=st.integers(-1000, 10**6),
    )
    def begin(self, ratio: float, min_per_second: float, ttl: float, start: int) -> None:
        self.options = {"ratio": ratio, "min_per_second": min_per_second, "ttl": ttl}
        self.budget = RetryBudget(**self.options)
        self.model = NaiveBudget(**self.options)
        self.now = start / 16

    @rule(sixteenths=st.integers(0, 40) | st.integers(0, 2000))
    def wait(self, sixteenths: int) -> None:
        self.now += sixteenths / 16

    @rule(calls=st.integers(1, 30))
    def deposit(self, calls: int) -> None:
        for _ in range(calls):
            self.budget.deposit(self.now)
            self.model.calls.append(self.now)

    @rule(wanted=st.integers(1, 30))
    def withdraw(self, wanted: int) -> None:
        for _ in range(wanted):
            least, most = self.model.least(self.now), self.model.most(self.now)
            granted = self.budget.withdraw(self.now)
            assert not granted or most >= 1 - 1e-9
            assert granted or least < 1 + 1e-9
            if granted:
                self.model.retries.append(self.now)

    @rule()
    def ask_what_remains(self) -> None:
        remaining = self.budget.remaining(self.now)
        assert max(0.0, self.model.least(self.now)) - 1e-9 <= remaining
        assert remaining <= max(0.0, self.model.most(self.now)) + 1e-9
        assert self.budget.remaining(self.now) == remaining

    @precondition(lambda self: self.model.retries)
    @invariant()
    def retries_in_any_window_are_paid_for(self) -> None:
        ttl, calls, retries = self.model.ttl, self.model.calls, self.model.retries
        end = retries[-1]
        spent = sum(end - ttl < at <= end for at in retries)
        paid = sum(end - ttl < at <= end for at in calls)
        assert spent <= self.model.reserve + self.model.ratio * paid + 1e-9


BudgetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBudget = BudgetMachine.TestCase


def exhaust(budget: RetryBudget, now: float) -> int:
    granted = 0
    while budget.withdraw(now):
        granted += 1
    return granted


def test_a_new_budget_has_its_reserve() -> None:
    budget = RetryBudget()
    assert budget.remaining(100.0) == 10.0
    assert exhaust(budget, 100.0) == 10
    assert budget.remaining(100.0) == 0.0
    assert not budget.withdraw(100.0)


def test_every_fifth_call_pays_for_a_retry() -> None:
    budget = RetryBudget(ratio=0.2, min_per_second=0.0)
    answers = []
    for _ in range(15):
        budget.deposit(0.0)
        answers.append(budget.withdraw(0.0))
    assert [number for number, granted in enumerate(answers, 1) if granted] == [5, 10, 15]


def test_a_refusal_takes_nothing() -> None:
    budget = RetryBudget(ratio=0.5, min_per_second=0.0)
    budget.deposit(0.0)
    for _ in range(5):
        assert not budget.withdraw(0.0)
    assert budget.remaining(0.0) == 0.5
    budget.deposit(0.0)
    assert budget.withdraw(0.0)


def test_calls_expire() -> None:
    budget = RetryBudget(ratio=1.0, min_per_second=0.0, ttl=10.0)
    budget.deposit(0.0)
    assert budget.remaining(9.99) == 1.0
    assert budget.remaining(10.0) == 0.0


def test_retries_are_forgotten_so_the_reserve_comes_back() -> None:
    budget = RetryBudget(min_per_second=0.5, ttl=10.0)
    assert exhaust(budget, 0.0) == 5
    assert exhaust(budget, 10.5) == 0
    assert exhaust(budget, 11.0) == 5
    assert exhaust(budget, 1e9) == 5


def test_what_expired_calls_paid_for_is_owed() -> None:
    budget = RetryBudget(ratio=1.0, min_per_second=0.1, ttl=10.0)
    for _ in range(5):
        budget.deposit(0.0)
    assert exhaust(budget, 5.0) == 6
    # The five calls are gone at 10 s, their retries are not before 16 s.
    assert budget.remaining(10.0) == 0.0
    budget.deposit(10.0)
    assert not budget.withdraw(10.0)
    assert exhaust(budget, 16.0) == 2


def test_in_an_outage_retries_settle_at_the_ratio() -> None:
    budget = RetryBudget(ratio=0.2, min_per_second=1.0, ttl=10.0)
    granted = 0
    for tenth in range(36_000):  # an hour, ten calls a second, and each of them wants one retry
        budget.deposit(tenth / 10)
        granted += budget.withdraw(tenth / 10)
    assert 0.8 * 3 <= granted / 3600 <= 3.0  # 2 paid for by calls and 1 from the reserve, in each second


def test_a_budget_is_idle_when_a_new_one_would_answer_the_same() -> None:
    budget = RetryBudget(ttl=10.0)
    assert budget.idle(0.0)
    budget.deposit(0.5)
    assert not budget.idle(9.5)
    assert budget.idle(10.0)
    assert budget.withdraw(10.5)
    assert not budget.idle(20.5)
    assert budget.idle(21.0)
    assert budget.remaining(21.0) == RetryBudget(ttl=10.0).remaining(21.0)


def test_a_clock_that_steps_back_changes_nothing() -> None:
    budget = RetryBudget(ratio=1.0, min_per_second=0.0, ttl=10.0)
    budget.deposit(100.0)
    budget.deposit(50.0)
    assert budget.remaining(0.0) == 2.0
    assert budget.withdraw(0.0)
    assert budget.remaining(109.99) == 1.0
    assert budget.remaining(110.0) == 0.0


def test_nothing_is_ever_allowed_when_nothing_is_given() -> None:
    budget = RetryBudget(ratio=0.0, min_per_second=0.0)
    for second in range(100):
        budget.deposit(second)
        assert not budget.withdraw(second)


@given(
    st.floats(0, 1),
    st.floats(0, 100),
    st.floats(1e-3, 1e4),
    st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=50),
)
def test_no_times_and_options_break_it(
    ratio: float, min_per_second: float, ttl: float, events: list[tuple[float, bool]]
) -> None:
    budget = RetryBudget(ratio=ratio, min_per_second=min_per_second, ttl=ttl)
    for now, is_call in events:
        if is_call:
            budget.deposit(now)
        else:
            before = budget.remaining(now)
            assert budget.withdraw(now) is (before >= 1)
        assert 0.0 <= budget.remaining(now) <= min_per_second * ttl + ratio * len(events)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("ratio", value) for value in (-0.1, 1.1, math.inf, math.nan)),
        *(("min_per_second", value) for value in (-1.0, math.inf, math.nan)),
        *(("ttl", value) for value in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_an_option_out_of_range_is_named(option: str, value: float) -> None:
    wrong: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=rf"^{option}={value!r}: allowed are "):
        RetryBudget(**wrong)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        RetryBudget(0.2)  # type: ignore[call-arg]
