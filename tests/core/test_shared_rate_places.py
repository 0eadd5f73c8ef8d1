"""Places in line, as a model: what is held is what the living hold, and of the dead nothing for long."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLedger, Verdict

CHARGE = RateCharge("k", 4.0, 0.5, 0.0)
LOOK = CHARGE
LONGEST = 60.0


@dataclass
class Place:
    """One who waits: what it asks for, when its turn is, and when it comes back, if it is alive."""

    charge: RateCharge
    due: float
    back: float


class Places(RuleBasedStateMachine):
    """Callers keep places, come back at any moment up to a second after their turn, give them up, or die."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = RateLedger()
        self.now = 1_000.0
        self.living: list[Place] = []
        self.dead: list[tuple[float, float]] = []  # what is held of them, and until when it may be

    def _ask(self, charge: RateCharge, early: float) -> None:
        decision = self.ledger.take([charge], self.now, most_wait=LONGEST, mode="h")
        if decision.verdict is Verdict.HELD:
            self._keep(charge, decision, early)

    def _keep(self, charge: RateCharge, decision: RateDecision, early: float) -> None:
        mine = charge._replace(held=decision.held[0], turn=decision.turn(0))
        due = self.now + decision.again
        self.living.append(Place(mine, due, self.now + (decision.again + 0.999) * early))

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        """Let time pass, and whoever comes back in it do so."""
        until = self.now + seconds
        while self.living and min(place.back for place in self.living) <= until:
            place = min(self.living, key=lambda each: each.back)
            self.living.remove(place)
            self.now = max(self.now, place.back)
            self._ask(place.charge, 1.0)
        self.now = until

    @rule(amount=st.integers(1, 4), early=st.sampled_from([0.05, 0.3, 0.9, 1.0]))
    def come(self, amount: int, early: float) -> None:
        self._ask(CHARGE._replace(amount=float(amount)), early)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        charge = self.living.pop(data.draw(st.integers(0, len(self.living) - 1))).charge
        self.ledger.settle([Change(*charge[:3], freed=charge.held, turn=charge.turn)], self.now)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        place = self.living.pop(data.draw(st.integers(0, len(self.living) - 1)))
        # After its own turn and a second at the latest, the places that were kept by then are the older ones.
        self.dead.append((place.charge.held, place.due + 1 + LONGEST + 1))

    @invariant()
    def what_is_held_is_theirs(self) -> None:
        bare = self.ledger.take([LOOK], self.now)
        bucket = self.ledger._buckets.get("k")
        missing = (
            0.0 if bucket is None else max(0.0, bucket.missing - (self.now - bucket.updated) * LOOK.rate)
        )
        held = LOOK.capacity - missing - bare.levels[0].level
        living = sum(place.charge.held for place in self.living)
        self.dead = [each for each in self.dead if each[1] >= self.now]
        assert living - 1e-6 <= held <= living + sum(amount for amount, _ in self.dead) + 1e-6


Places.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPlaces = Places.TestCase


def test_who_comes_back_too_early_keeps_its_turn() -> None:
    charge = RateCharge("k", 1.0, 1.0, 1.0)
    ledger = RateLedger()
    ledger.take([charge], 0.0)
    first, second = (ledger.take([charge], 0.0, most_wait=30.0, mode="h") for _ in range(2))
    assert (first.again, second.again) == (1.0, 2.0)
    mine = charge._replace(held=1.0, turn=second.turn(0))
    early = ledger.take([mine], 0.25, most_wait=30.0, mode="h")
    assert early.verdict is Verdict.HELD
    assert early.again == pytest.approx(1.75)


def test_who_comes_back_too_early_has_the_turn_of_one_before_it_that_gave_up() -> None:
    charge = RateCharge("k", 1.0, 1.0, 1.0)
    ledger = RateLedger()
    ledger.take([charge], 0.0)
    first, second = (ledger.take([charge], 0.0, most_wait=30.0, mode="h") for _ in range(2))
    ledger.settle([Change(*charge[:3], freed=1.0, turn=first.turn(0))], 0.2)
    mine = charge._replace(held=1.0, turn=second.turn(0))
    assert ledger.take([mine], 0.25, most_wait=30.0, mode="h").again == pytest.approx(0.75)


def test_of_the_dead_nothing_is_held_for_long_however_often_others_come_and_go() -> None:
    charge = RateCharge("k", 4.0, 0.1, 4.0)
    ledger = RateLedger()
    ledger.take([charge], 0.0)
    assert ledger.take([charge], 0.0, most_wait=60.0, mode="h").again == 40.0  # and dies
    one = charge._replace(amount=1.0)
    for second in range(1, 150):
        place = ledger.take([one], float(second), most_wait=1e3, mode="h")
        if place.verdict is Verdict.HELD:
            gone = Change(*one[:3], freed=1.0, turn=place.turn(0))
        else:
            gone = Change(*one[:3], back=1.0)
        ledger.settle([gone], second + 0.5)
    assert ledger.take([one], 150.0).levels[0].level == pytest.approx(3.0)


def test_of_several_buckets_all_are_held_until_the_turn() -> None:
    soon, late = RateCharge("soon", 1.0, 1.0, 1.0), RateCharge("late", 1.0, 0.1, 1.0)
    ledger = RateLedger()
    ledger.take([soon, late], 0.0)
    held = ledger.take([soon, late], 0.0, most_wait=30.0, mode="h")
    assert list(held.held) == [1.0, 1.0]
    assert held.again == 10.0
    for at in (3.0, 6.0, 9.9):
        assert ledger.take([soon], at).verdict is Verdict.REFUSED
