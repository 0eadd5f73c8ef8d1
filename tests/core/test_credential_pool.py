"""Credentials in turn, within their caps, and set aside while their provider refuses them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilient_llm import Credential
from resilient_llm.core.credential_pool import CredentialPool, CredentialState, CredentialUse, Terms


@dataclass(frozen=True)
class Key:
    purposes: frozenset[str] = frozenset()
    max_concurrent: int | None = None
    requests_per_minute: float | None = None


BATCH = Key(purposes=frozenset({"batch"}))


def taken(
    pool: CredentialPool, times: int, *, now: float = 0.0, purpose: str | None = None
) -> list[int | None]:
    return [pool.take(now, purpose) for _ in range(times)]


def states(pool: CredentialPool, now: float) -> list[CredentialState]:
    return [one.state for one in pool.health(now)]


def test_a_credential_is_what_a_pool_takes() -> None:
    key: Terms = Credential(env="KEY", purposes={"batch"}, max_concurrent=1)
    assert CredentialPool([key]).take(0, "batch") == 0


def test_the_least_busy_is_taken_and_of_equals_the_one_used_longest_ago() -> None:
    pool = CredentialPool([Key(), Key(), Key()])
    assert taken(pool, 4) == [0, 1, 2, 0]
    pool.release(1)
    assert taken(pool, 2) == [1, 2]
    alone = CredentialPool([Key(), Key()])
    one_after_the_other = []
    for _ in range(4):
        index = alone.take(0, None)
        assert index is not None
        alone.release(index)
        one_after_the_other.append(index)
    assert one_after_the_other == [0, 1, 0, 1]


def test_calls_spread_in_proportion_to_what_each_may_carry() -> None:
    pool = CredentialPool([Key(max_concurrent=30), Key(max_concurrent=10), Key()])
    assert Counter(taken(pool, 35)) == {0: 15, 1: 5, 2: 15}


def test_a_full_credential_is_passed_over_and_a_full_pool_says_so() -> None:
    pool = CredentialPool([Key(max_concurrent=1), Key(max_concurrent=2)])
    assert sorted(index for index in taken(pool, 4) if index is not None) == [0, 1, 1]
    assert pool.take(0, None) is None
    assert pool.available_in(0, None) == 1  # nobody knows when calls end
    pool.release(0)
    assert pool.available_in(0, None) == 0
    assert pool.take(0, None) == 0


def test_a_cap_per_minute_comes_back_evenly() -> None:
    pool = CredentialPool([Key(requests_per_minute=30)])
    assert taken(pool, 31) == [0] * 30 + [None]
    assert pool.available_in(0, None) == pytest.approx(2)
    assert pool.take(1.9, None) is None
    assert pool.take(2.0, None) == 0


def test_a_credential_is_kept_for_its_purposes() -> None:
    pool = CredentialPool([BATCH, Key(), Key(purposes=frozenset({"realtime", "canary"}))])
    assert set(taken(pool, 6)) == {1}
    assert Counter(taken(pool, 8, purpose="batch")) == {0: 7, 1: 1}
    assert Counter(taken(pool, 9, purpose="canary")) == {1: 1, 2: 8}
    assert CredentialPool([BATCH]).take(0, None) is None
    assert CredentialPool([BATCH]).available_in(0, "realtime") == math.inf


def test_each_refusal_in_a_row_doubles_the_pause_up_to_a_quarter_of_an_hour() -> None:
    pool, now, pauses = CredentialPool([Key()]), 0.0, []
    for _ in range(7):
        assert pool.take(now, None) == 0
        pool.release(0, taken=now, ok=False)
        pool.set_aside(0, now, None, taken=now)
        pauses.append(pool.available_in(now, None))
        assert pool.take(now + pauses[-1] - 0.001, None) is None
        now += pauses[-1]
    assert pauses == [60, 120, 240, 480, 900, 900, 900]


@pytest.mark.parametrize(("hint", "pause"), [(None, 60), (5.0, 5), (7200.0, 900), (0.0, 60), (math.inf, 900)])
def test_the_provider_may_say_when(hint: float | None, pause: float) -> None:
    pool = CredentialPool([Key()])
    pool.set_aside(0, 10, hint)
    assert pool.available_in(10, None) == pause


def test_one_call_at_a_time_tries_it_again_and_an_answer_brings_it_back() -> None:
    pool = CredentialPool([Key(), Key()])
    pool.set_aside(0, 0, None)
    assert states(pool, 59) == [CredentialState.SET_ASIDE, CredentialState.LIVING]
    assert set(taken(pool, 3, now=59)) == {1}
    assert states(pool, 60) == [CredentialState.HALF_OPEN, CredentialState.LIVING]
    assert taken(pool, 3, now=60) == [0, 1, 1]
    pool.release(0, taken=60, ok=True)
    assert states(pool, 61) == [CredentialState.LIVING] * 2
    assert taken(pool, 3, now=61) == [0, 0, 0]
    pool.set_aside(0, 62, None, taken=61)
    assert pool.health(62)[0].back_in == 60  # it had lived: the pauses begin anew


def test_a_trial_that_says_nothing_makes_room_for_another() -> None:
    pool = CredentialPool([Key()])
    pool.set_aside(0, 0, None)
    assert taken(pool, 2, now=60) == [0, None]
    assert pool.available_in(60, None) == 1
    pool.release(0, taken=60)  # cancelled, or the network was down
    assert states(pool, 60) == [CredentialState.HALF_OPEN]
    assert taken(pool, 2, now=60) == [0, None]


def test_what_began_before_says_nothing_afterwards() -> None:
    pool = CredentialPool([Key()])
    assert taken(pool, 4) == [0, 0, 0, 0]
    pool.release(0, taken=0)
    pool.set_aside(0, 1, None, taken=0)
    pool.release(0, taken=0)
    pool.set_aside(0, 1.5, None, taken=0)  # refused together: once is enough
    assert pool.available_in(2, None) == 59
    pool.release(0, taken=0, ok=True)  # a long stream that began when it was still good
    assert states(pool, 2) == [CredentialState.SET_ASIDE]
    pool.set_aside(0, 61, None, taken=0)  # a late refusal, after the pause
    assert taken(pool, 1, now=61) == [0]
    pool.release(0, taken=0, ok=True)  # not the call that tries it
    assert taken(pool, 1, now=61) == [None]
    pool.set_aside(0, 62, 30.0, taken=0)  # it may still say for how long
    pool.release(0, taken=61)
    assert pool.available_in(62, None) == 30


def test_a_throttled_credential_rests_and_its_pool_when_all_do() -> None:
    pool = CredentialPool([Key(), Key(), Key()])
    pool.set_aside(2, 0, None)
    pool.rest(0, 0, 5)
    pool.rest(0, 0, 3)
    assert pool.resting(0) == 0
    assert states(pool, 0) == [CredentialState.RESTING, CredentialState.LIVING, CredentialState.SET_ASIDE]
    assert set(taken(pool, 3, now=4)) == {1}
    pool.rest(1, 4, 7)
    assert pool.resting(4) == 1
    assert (pool.is_usable(4), pool.is_ready(4, None), pool.take(4, None)) == (False, False, None)
    assert pool.wait(4, None, patience=0) == 1
    assert pool.health(4)[0].back_in == 1
    assert pool.take(5, None) == 0


def test_a_refused_credential_is_waited_for_with_patience_only() -> None:
    pool = CredentialPool([Key()])
    pool.set_aside(0, 0, 8.0)
    assert pool.wait(0, None, patience=7.9) == math.inf
    assert pool.wait(0, None, patience=8.0) == 8
    assert pool.take(8, None) == 0
    assert pool.wait(8, None, patience=0.0) == math.inf  # somebody is trying it


def test_one_in_use_takes_no_time_to_wait_for_that_anybody_knows() -> None:
    pool = CredentialPool([Key(max_concurrent=1, requests_per_minute=1)])
    assert pool.take(0, None) == 0
    assert pool.free_in(0, None) == math.inf
    assert pool.wait(0, None, patience=0) == pytest.approx(60)
    pool.release(0)
    assert pool.free_in(0, None) == pytest.approx(60)
    assert pool.wait(60, None, patience=0) == 0
    assert pool.wait(60, "other", patience=0) == 0
    assert CredentialPool([BATCH]).wait(0, None, patience=0) == math.inf


def test_pools_share_what_is_known_of_the_credentials_they_have_in_common() -> None:
    known: dict[Terms, CredentialUse] = {}
    shared, other = Key(max_concurrent=1), Key(max_concurrent=2)
    first = CredentialPool([shared], known=known)
    second = CredentialPool([other, shared], known=known)
    assert first.take(0, None) == 0
    assert taken(second, 3) == [0, 0, None]
    first.set_aside(0, 0, None)
    assert states(second, 0) == [CredentialState.LIVING, CredentialState.SET_ASIDE]
    second.rest(0, 0, 9)
    assert CredentialPool([other], known=known).resting(0) == 0


def test_a_replaced_credential_lives_at_once() -> None:
    pool = CredentialPool([Key()])
    pool.set_aside(0, 0, None)
    pool.restore(0)
    assert taken(pool, 2, now=0) == [0, 0]
    assert pool.health(0)[0] == (CredentialState.LIVING, 2, 0)


@pytest.mark.parametrize(("first", "longest"), [(0, 1), (2, 1), (1, math.inf), (math.nan, 1)])
def test_options_are_checked(first: float, longest: float) -> None:
    with pytest.raises(ValueError, match="first="):
        CredentialPool([], first=first, longest=longest)


@given(st.lists(st.sampled_from([0.0, 0.01, 0.5, 3.0]), max_size=300), st.sampled_from([0.5, 6.0, 90.0]))
def test_no_more_than_a_cap_per_minute_is_given_out(waits: list[float], rate: float) -> None:
    pool, now, granted = CredentialPool([Key(requests_per_minute=rate)]), 0.0, list[float]()
    for wait in waits:
        now += wait
        if pool.take(now, None) is not None:
            granted.append(now)
            pool.release(0)
    for begin, since in enumerate(granted):
        for end in range(begin, len(granted)):
            most = max(1, rate) + rate / 60 * (granted[end] - since)
            assert end - begin + 1 <= most + 1e-3


PURPOSES = st.sampled_from([None, "batch", "realtime"])
KEYS = st.builds(
    Key,
    purposes=st.sampled_from([frozenset(), frozenset({"batch"}), frozenset({"batch", "realtime"})]),
    max_concurrent=st.sampled_from([None, 1, 2]),
)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, answers and refusals, beside a model that is a list of who holds what."""

    @initialize(keys=st.lists(KEYS, min_size=1, max_size=4))
    def begin(self, keys: list[Key]) -> None:
        self.now = 0.0
        self.keys = keys
        self.pool = CredentialPool(keys)
        self.held: list[tuple[int, float]] = []
        self.trying: dict[int, float] = {}  # since when a half-open one is being tried
        self.until = dict.fromkeys(range(len(keys)), -math.inf)
        self.dead: dict[int, float] = {}
        self.died = dict.fromkeys(range(len(keys)), -math.inf)  # when last, also of those that live again

    @rule(seconds=st.sampled_from([0.5, 20.0, 61.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def free(self, index: int, purpose: str | None) -> bool:
        key = self.keys[index]
        held = sum(one == index for one, _ in self.held)
        if key.purposes and purpose not in key.purposes:
            return False
        if index in self.dead and (self.now < self.until[index] or index in self.trying):
            return False
        return key.max_concurrent is None or held < key.max_concurrent

    @rule(purpose=PURPOSES)
    def take(self, purpose: str | None) -> None:
        free = [index for index in range(len(self.keys)) if self.free(index, purpose)]
        assert (self.pool.available_in(self.now, purpose) == 0) == bool(free)
        index = self.pool.take(self.now, purpose)
        assert (index in free) if free else index is None
        if index is not None:
            if index in self.dead:
                self.trying[index] = self.now
            self.held.append((index, self.now))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ok=st.sampled_from([True, None]))
    def end(self, data: st.DataObject, ok: bool | None) -> None:
        index, since = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(index, taken=since, ok=ok)
        if index in self.dead and since > self.dead[index]:
            self.trying.pop(index, None)
            if ok:
                del self.dead[index]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), hint=st.sampled_from([None, 10.0]), release_first=st.booleans())
    def refuse(self, data: st.DataObject, hint: float | None, *, release_first: bool) -> None:
        index, since = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        was = self.pool.health(self.now)[index]
        if release_first:
            self.pool.release(index, taken=since)
        self.pool.set_aside(index, self.now, hint, taken=since)
        if not release_first:
            self.pool.release(index, taken=since)
        now = self.pool.health(self.now)[index]
        if since > self.died[index]:  # else it was not the one that tried it again
            self.trying.pop(index, None)
        if was.state is CredentialState.SET_ASIDE or since <= self.died[index]:
            self.until[index] = max(self.until[index], self.now + (hint or 0.0))
        else:
            self.dead[index] = self.died[index] = self.now
            self.until[index] = self.now + now.back_in
            assert now.back_in == pytest.approx(hint) if hint else 60 <= now.back_in <= 900

    @invariant()
    def it_agrees_with_the_list(self) -> None:
        for index, health in enumerate(self.pool.health(self.now)):
            assert health.in_flight == sum(one == index for one, _ in self.held)
            assert (health.state is CredentialState.LIVING) == (index not in self.dead)
            if index in self.dead:
                assert health.back_in == pytest.approx(max(0.0, self.until[index] - self.now))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
