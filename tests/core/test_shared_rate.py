"""The reference of shared rate limits: conservation under take, settle and cancel, whoever does it and whenever."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLedger, Verdict

SIZES = {"requests": (5.0, 1.0), "tokens": (100.0, 7.0), "account": (8.0, 0.5)}
AMOUNTS = {"requests": 1.0, "account": 1.0}


def charges(tokens: float, held: dict[str, float] | None = None, turn: float = 0.0) -> list[RateCharge]:
    held = held or {}
    return [
        RateCharge(key, *SIZES[key], AMOUNTS.get(key, tokens), key != "account", held.get(key, 0.0), turn)
        for key in SIZES
    ]


@dataclass
class Place:
    """One who waits: what is held, and when to come back."""

    tokens: float
    due: float
    held: dict[str, float]


class Conservation(RuleBasedStateMachine):
    """Grants in any T seconds, less what is given back, are at most capacity + rate * T."""

    taken = Bundle("taken")
    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = RateLedger()
        self.now = 0.0
        self.log: list[tuple[float, str, float, bool]] = []

    def _grant(self, tokens: float) -> None:
        for charge in charges(tokens):
            self.log.append((self.now, charge.key, charge.amount, True))

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=taken, tokens=st.integers(0, 100))
    def take(self, tokens: int) -> object:
        decision = self.ledger.take(charges(tokens), self.now)
        if decision.verdict is not Verdict.TAKEN:
            assert decision.wait > 0
            return multiple()
        self._grant(tokens)
        return float(tokens)

    @rule(target=places, tokens=st.integers(0, 100), most_wait=st.floats(0, 40))
    def keep_a_place(self, tokens: int, most_wait: float) -> object:
        decision = self.ledger.take(charges(tokens), self.now, most_wait=most_wait, mode="h")
        if decision.verdict is Verdict.TAKEN:
            self._grant(tokens)
        if decision.verdict is not Verdict.HELD:
            return multiple()
        assert 0 < decision.again <= decision.wait <= most_wait
        return self._place(tokens, decision)

    def _place(self, tokens: float, decision: RateDecision) -> Place:
        return Place(tokens, self.now + decision.again, dict(zip(SIZES, decision.held, strict=True)))

    @rule(target=places, place=consumes(places), late=st.floats(0, 3))
    def come_back(self, place: Place, late: float) -> object:
        self.now = max(self.now, place.due + late)
        asked = charges(place.tokens, place.held, place.due)
        decision = self.ledger.take(asked, self.now, most_wait=1e9, mode="h")
        if decision.verdict is Verdict.TAKEN:
            self._grant(place.tokens)
            return multiple()
        return self._place(place.tokens, decision)

    @rule(place=consumes(places))
    def give_a_place_up(self, place: Place) -> None:
        self.ledger.settle(
            [Change(key, *SIZES[key], 0.0, held, place.due) for key, held in place.held.items()], self.now
        )

    @rule(tokens=consumes(taken), used=st.integers(0, 130))
    def settle(self, tokens: float, used: int) -> None:
        before = self.ledger.settle([Change("tokens", *SIZES["tokens"])], self.now)[0].level
        (level,) = self.ledger.settle([Change("tokens", *SIZES["tokens"], tokens - used)], self.now)
        # What a full bucket or the deepest debt swallows was not given back, or charged.
        self.log.append((self.now, "tokens", before - level.level, False))

    @rule(tokens=consumes(taken))
    def cancel(self, tokens: float) -> None:
        before = {key: self.ledger.settle([Change(key, *SIZES[key])], self.now)[0].level for key in SIZES}
        for charge in charges(tokens):
            (level,) = self.ledger.settle(
                [Change(charge.key, charge.capacity, charge.rate, charge.amount)], self.now
            )
            self.log.append((self.now, charge.key, before[charge.key] - level.level, False))

    @invariant()
    def conserved(self) -> None:
        for key, (capacity, rate) in SIZES.items():
            # A bucket beside the ledger: what it allows at a grant is never less than was granted.
            allowed, at = capacity, 0.0
            for when, name, amount, is_grant in self.log:
                if name == key:
                    allowed = min(capacity, allowed + rate * (when - at)) - amount
                    at = when
                    assert allowed >= -1e-5 or not (is_grant and amount), (key, when, amount, allowed)


Conservation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConservation = Conservation.TestCase


def test_state_is_forgotten_once_it_is_full_again() -> None:
    ledger = RateLedger()
    for index in range(5_000):
        ledger.take([RateCharge(f"tenant {index}", 10, 1, 1, own=True)], index * 0.1)
    assert len(ledger) < 500


def test_a_place_that_nobody_comes_back_to_is_free_a_second_later() -> None:
    ledger = RateLedger()
    charge = RateCharge("k", 1, 1, 1, own=True)
    ledger.take([charge], 0.0)
    held = ledger.take([charge], 0.0, most_wait=5, mode="h")
    assert held.verdict is Verdict.HELD
    assert ledger.take([charge], 1.5).verdict is Verdict.REFUSED
    assert ledger.take([charge], 2.01).verdict is Verdict.TAKEN


def test_a_late_holder_takes_nothing_that_others_have_taken() -> None:
    ledger = RateLedger()
    charge = RateCharge("k", 10, 1, 10, own=True)
    ledger.take([charge], 0.0)
    held = ledger.take([charge], 0.0, most_wait=60, mode="h")
    ledger.settle([Change("k", 10, 1, 10.0)], 1.0)
    other = ledger.take([charge], 11.5)  # the place is forgotten
    assert (held.again, other.verdict) == (10.0, Verdict.TAKEN)
    late = ledger.take([charge._replace(held=10.0, turn=held.turn(0))], 11.5, most_wait=60, mode="h")
    assert late.verdict is Verdict.HELD
    assert late.again == pytest.approx(10)


def test_a_clock_that_steps_back_mints_nothing_and_takes_nothing_away() -> None:
    ledger = RateLedger()
    charge = RateCharge("k", 10, 1, 5, own=True)
    ledger.take([charge], 100.0)
    assert ledger.take([charge._replace(amount=0)], 70.0).levels[0].level == 5
    assert ledger.take([charge._replace(amount=0)], 101.0).levels[0].level == 6
