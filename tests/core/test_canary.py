"""Rollouts beside a model of what they may do, the judgement of samples, and who is in at which share."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from resilient_llm.core.canary import Drawn, Rollout, RolloutOptions, RolloutState, place_of
from resilient_llm.core.sample import Result, Sample
from resilient_llm.core.slo import SLO, Finding, Judgement, judge

KEPT, UNCLEAR, VIOLATED = Judgement.KEPT, Judgement.UNCLEAR, Judgement.VIOLATED


def sample(
    calls: int = 0,
    errors: int = 0,
    client_errors: int = 0,
    first_tokens: tuple[float, ...] = (),
    costs: tuple[float, ...] = (),
) -> Sample:
    made = Sample()
    for number in range(calls):
        made.record(
            Result.ERROR if number < errors else Result.SUCCESS,
            first_token=first_tokens[number % len(first_tokens)] if first_tokens else None,
            cost=costs[number % len(costs)] if costs else None,
        )
    for _ in range(client_errors):
        made.record(Result.CLIENT_ERROR)
    return made


# Samples


@given(times=st.lists(st.floats(0.001, 1_000), min_size=1, max_size=300))
def test_a_p99_is_right_to_within_5_percent(times: list[float]) -> None:
    made = Sample()
    for time in times:
        made.record(Result.SUCCESS, first_token=time)
    exact = sorted(times)[math.ceil(0.99 * len(times)) - 1]
    assert made.p99_first_token == pytest.approx(exact, rel=0.05)


def test_a_first_token_that_never_came_is_slower_than_any() -> None:
    made = sample(99, first_tokens=(0.5,))
    made.record(Result.ERROR, first_token=math.inf)
    assert made.slower(1e6) == 1
    assert made.p99_first_token == pytest.approx(0.5, rel=0.05)
    made.record(Result.ERROR, first_token=math.inf)
    assert made.p99_first_token == math.inf


@given(
    parts=st.lists(
        st.lists(
            st.tuples(st.sampled_from(Result), st.none() | st.floats(0, 100), st.none() | st.floats(0, 10)),
            max_size=20,
        ),
        max_size=5,
    )
)
def test_adding_samples_is_as_recording_everything_in_one(
    parts: list[list[tuple[Result, float | None, float | None]]],
) -> None:
    whole, added = Sample(), Sample()
    for part in parts:
        one = Sample()
        for result, first_token, cost in part:
            one.record(result, first_token=first_token, cost=cost)
            whole.record(result, first_token=first_token, cost=cost)
        added.add(one)
    for name in ("calls", "errors", "client_errors", "timed", "priced", "p99_first_token", "error_ratio"):
        assert getattr(whole, name) == getattr(added, name)
    assert added.mean_cost == pytest.approx(whole.mean_cost)
    assert added.cost_variance == pytest.approx(whole.cost_variance, abs=1e-9)


# Judgements


@pytest.mark.parametrize(
    ("errors", "calls", "judgement"),
    [
        (0, 50, KEPT),
        (0, 49, UNCLEAR),  # too few
        (2, 50, KEPT),
        (3, 50, UNCLEAR),  # 6 %, which may be chance
        (8, 50, VIOLATED),
        (2, 2, UNCLEAR),  # two prove nothing
        (3, 3, VIOLATED),
        (3, 20, UNCLEAR),
        (5, 20, VIOLATED),
        (70, 1000, VIOLATED),
    ],
)
def test_an_error_ratio_is_judged_by_wilson(errors: int, calls: int, judgement: Judgement) -> None:
    assert judge(SLO(error_ratio=0.05), sample(calls, errors), None, min_calls=50).judgement is judgement


def test_a_finding_names_the_bound() -> None:
    assert judge(SLO(), sample(10, 10), None, min_calls=50) == Finding(VIOLATED, "error_ratio")
    assert judge(SLO(), sample(10), None, min_calls=50) == Finding(UNCLEAR, "min_calls")
    assert judge(SLO(), sample(50), None, min_calls=50) == Finding(KEPT)


@pytest.mark.parametrize(
    ("slo", "candidate", "baseline", "expected"),
    [
        pytest.param(
            SLO(error_ratio=None, error_increase=0.02),
            sample(100, 22),
            sample(1000, 200),
            KEPT,
            id="as bad as the baseline",
        ),
        pytest.param(
            SLO(error_ratio=None, error_increase=0.02),
            sample(100, 40),
            sample(1000, 200),
            VIOLATED,
            id="twice as bad",
        ),
        pytest.param(
            SLO(error_ratio=None, error_increase=0.02),
            sample(100, 25),
            sample(1000, 200),
            UNCLEAR,
            id="perhaps worse",
        ),
        pytest.param(
            SLO(error_ratio=None, error_increase=0.02),
            sample(100, 0),
            sample(10, 0),
            UNCLEAR,
            id="hardly any baseline",
        ),
        pytest.param(
            SLO(client_error_increase=0.05),
            sample(50, 0, client_errors=50),
            sample(100, 0, client_errors=1),
            VIOLATED,
            id="refuses what the baseline takes",
        ),
        pytest.param(
            SLO(client_error_increase=0.05),
            sample(50, 0, client_errors=50),
            sample(100, 0, client_errors=100),
            KEPT,
            id="refuses what the baseline refuses, too",
        ),
        pytest.param(
            SLO(client_error_ratio=0.1), sample(50, 0, client_errors=30), None, VIOLATED, id="many refusals"
        ),
        pytest.param(
            SLO(p99_first_token=1.0), sample(100, first_tokens=(0.9,)), None, KEPT, id="quick enough"
        ),
        pytest.param(
            SLO(p99_first_token=1.0), sample(100, first_tokens=(1.2,)), None, VIOLATED, id="always slow"
        ),
        pytest.param(
            SLO(p99_first_token=1.0),
            sample(100, first_tokens=(0.9,) * 49 + (2.0,)),
            None,
            UNCLEAR,
            id="two of 100 slow",
        ),
        pytest.param(SLO(p99_first_token=1.0), sample(100), None, UNCLEAR, id="no times known"),
        pytest.param(
            SLO(p99_first_token_ratio=1.5),
            sample(100, first_tokens=(1.4,)),
            sample(100, first_tokens=(1.0,)),
            KEPT,
            id="a little slower",
        ),
        pytest.param(
            SLO(p99_first_token_ratio=1.5),
            sample(100, first_tokens=(2.0,)),
            sample(100, first_tokens=(1.0,)),
            VIOLATED,
            id="twice as slow",
        ),
        pytest.param(
            SLO(cost_ratio=1.2),
            sample(100, costs=(0.011,)),
            sample(100, costs=(0.010,)),
            KEPT,
            id="a little dearer",
        ),
        pytest.param(
            SLO(cost_ratio=1.2),
            sample(100, costs=(0.02, 0.03)),
            sample(100, costs=(0.010, 0.011)),
            VIOLATED,
            id="much dearer",
        ),
        pytest.param(
            SLO(cost_ratio=1.2),
            sample(60, costs=(0.001, 0.001, 0.001, 0.05)),
            sample(100, costs=(0.010,)),
            UNCLEAR,
            id="dearer by a few calls",
        ),
        pytest.param(SLO(cost_ratio=1.2), sample(100), sample(100), UNCLEAR, id="no price known"),
        pytest.param(SLO(cost=0.01), sample(50, costs=(0.02,)), None, VIOLATED, id="over a cost in dollars"),
        pytest.param(SLO(cost=0.02), sample(50, costs=(0.02,)), None, KEPT, id="just that cost"),
    ],
)
def test_each_bound(slo: SLO, candidate: Sample, baseline: Sample | None, expected: Judgement) -> None:
    assert judge(slo, candidate, baseline, min_calls=50).judgement is expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"error_ratio": 1.5},
        {"error_ratio": -0.1},
        {"error_ratio": math.nan},
        {"error_ratio": "0.1"},
        {"error_ratio": True},
        {"p99_first_token": 0},
        {"p99_first_token": math.inf},
        {"cost_ratio": 0},
        {"cost": math.inf},
        {"error_ratio": None},
        {"confidence": 1},
        {"confidence": 0.5},
        {"confidence": "high"},
    ],
)
def test_an_slo_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SLO(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": ()},
        {"steps": (0.5, 0.25)},
        {"steps": (0.0, 1.0)},
        {"steps": (0.5, 1.5)},
        {"steps": (0.5, 0.5)},
        {"steps": "all"},
        {"steps": 0.5},
        {"slo": 0.05},
        {"min_calls": 0},
        {"min_calls": 1.5},
        {"min_calls": True},
        {"step_duration": 0},
        {"step_duration": math.inf},
        {"cool_off": "1 h"},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RolloutOptions(**wrong)  # type: ignore[arg-type]


# Who is in


@given(key=st.text() | st.integers() | st.tuples(st.text(), st.integers()), salt=st.text(max_size=5))
def test_a_place_is_the_same_each_time_and_below_1(key: object, salt: str) -> None:
    place = place_of(key, salt)
    assert 0 <= place < 1
    assert place == place_of(key, salt)


def test_places_are_known_facts() -> None:
    # In every process and version the same, or keys would change sides with a release. As said by b2sum -l 64.
    assert place_of("acme", "chat>chat-next") == pytest.approx(0.183129668, abs=1e-9)
    assert place_of("acme", "another salt") == pytest.approx(0.271404950, abs=1e-9)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_a_share_of_keys_is_about_that_share(share: float) -> None:
    places = [place_of(f"tenant {number}", "salt") for number in range(10_000)]
    assert sum(place < share for place in places) / 10_000 == pytest.approx(share, abs=0.015)


def test_other_salts_draw_other_keys() -> None:
    both = sum(place_of(f"{n}", "one") < 0.5 and place_of(f"{n}", "two") < 0.5 for n in range(10_000))
    assert both / 10_000 == pytest.approx(0.25, abs=0.02)


# Rollouts

OPTIONS = RolloutOptions(steps=(0.05, 0.25, 1.0), min_calls=10, step_duration=60, cool_off=300)


def play(rollout: Rollout, now: float, calls: int, *, every: float = 0.0, errors: int = 0) -> float:
    """Let calls of the candidate's end, one every so many seconds; the first of them fail."""
    for number in range(calls):
        drawn = rollout.draw(0.0, now)
        rollout.record(drawn, now, Result.ERROR if number < errors else Result.SUCCESS)
        now += every
    return now


def reasons(rollout: Rollout) -> list[tuple[str, float]]:
    return [(change.reason, change.to_share) for change in rollout.drain()]


def test_it_goes_through_its_steps_and_is_promoted() -> None:
    rollout = Rollout(OPTIONS)
    shares = [rollout.share]
    now = 0.0
    while rollout.state is RolloutState.RUNNING:
        now = play(rollout, now, 1, every=6)
        shares.append(rollout.share)
    assert sorted(set(shares)) == [0.05, 0.25, 1.0]
    assert rollout.state is RolloutState.PROMOTED
    assert now == 186  # each step lasts 60 s, and the next call comes 6 s after the third of them
    assert reasons(rollout) == [("passed", 0.25), ("passed", 1.0), ("passed", 1.0)]


def test_a_last_step_below_all_calls_is_held() -> None:
    rollout = Rollout(RolloutOptions(steps=(0.05,), min_calls=10, step_duration=60))
    play(rollout, 0, 20, every=6)
    assert (rollout.state, rollout.share) == (RolloutState.HELD, 0.05)
    play(rollout, 1_000, 5, errors=5)  # and still watched
    assert rollout.state is RolloutState.ROLLED_BACK


@pytest.mark.parametrize(
    ("calls", "every", "waits_for"),
    [(9, 10.0, "min_calls"), (59, 1.0, "step_duration"), (100, 0.1, "step_duration")],
)
def test_it_waits_for_time_and_for_calls(calls: int, every: float, waits_for: str) -> None:
    rollout = Rollout(OPTIONS)
    now = play(rollout, 0, calls, every=every)
    assert rollout.share == 0.05
    assert rollout.waits_for(now) == waits_for


def test_it_does_not_step_while_an_slo_may_be_violated() -> None:
    rollout = Rollout(OPTIONS)
    now = play(rollout, 0, 11, every=6, errors=1)  # 1 of 11 is more than 5 %
    assert (rollout.share, rollout.waits_for(now)) == (0.05, "error_ratio")
    # What is older than a step is forgotten, once there is enough without it.
    play(rollout, now, 1)
    assert rollout.share == 0.25


def test_it_is_rolled_back_at_once_and_begins_again_after_a_while() -> None:
    rollout = Rollout(OPTIONS)
    play(rollout, 0, 3, errors=3)
    assert (rollout.state, rollout.share) == (RolloutState.ROLLED_BACK, 0.0)
    assert not rollout.draw(0.0, 299).candidate
    assert rollout.restarts_in(299) == 1
    assert rollout.draw(0.0, 300).candidate
    assert reasons(rollout) == [("error_ratio", 0.0), ("cool_off", 0.05)]


def test_it_waits_for_a_human_where_told_so() -> None:
    rollout = Rollout(RolloutOptions(restart=False))
    rollout.draw(0.0, 0)
    rollout.roll_back(0)
    assert rollout.restarts_in(1e9) == math.inf
    assert not rollout.draw(0.0, 1e9).candidate
    rollout.resume(1e9)
    assert rollout.draw(0.0, 1e9).candidate
    assert reasons(rollout) == [("rolled_back_by_hand", 0.0), ("resumed_by_hand", 0.05)]


def test_what_was_drawn_before_a_roll_back_says_nothing_after_it() -> None:
    rollout = Rollout(OPTIONS)
    late = [rollout.draw(0.0, 0) for _ in range(10)]
    rollout.roll_back(1)
    rollout.resume(2)
    for drawn in late:
        rollout.record(drawn, 3, Result.ERROR)
    assert (rollout.state, rollout.candidate.calls) == (RolloutState.RUNNING, 0)


def test_slow_failures_of_an_earlier_step_still_count() -> None:
    rollout = Rollout(OPTIONS)
    late = [rollout.draw(0.0, 0) for _ in range(10)]
    play(rollout, 0, 12, every=6)
    assert rollout.share == 0.25
    for drawn in late:
        rollout.record(drawn, 80, Result.ERROR)
    assert rollout.state is RolloutState.ROLLED_BACK


def test_with_all_calls_the_candidate_is_compared_with_the_step_before() -> None:
    slo = SLO(error_ratio=None, p99_first_token_ratio=1.5)
    rollout = Rollout(RolloutOptions(steps=(0.5, 1.0), slo=slo, min_calls=10, step_duration=60))

    def both(now: float, first_token: float) -> None:
        for place in (0.1, 0.9):
            drawn = rollout.draw(place, now)
            time = first_token if drawn.candidate else 1.0
            rollout.record(drawn, now, Result.SUCCESS, first_token=time)

    for second in range(0, 66, 3):
        both(second, 1.0)
    assert rollout.share == 1.0
    for second in range(66, 80):
        rollout.record(Drawn(candidate=True, run=rollout.run), second, Result.SUCCESS, first_token=2.0)
    assert reasons(rollout)[-1] == ("p99_first_token_ratio", 0.0)


def test_by_hand() -> None:
    rollout = Rollout(OPTIONS)
    rollout.set_share(0.4, 0)
    play(rollout, 0, 1_000, every=1)
    assert (rollout.state, rollout.share) == (RolloutState.HELD, 0.4)
    rollout.resume(1_000)
    assert (rollout.state, rollout.share, rollout.step) == (RolloutState.RUNNING, 0.25, 1)
    rollout.promote(1_001)
    play(rollout, 1_002, 100, errors=100)
    assert (rollout.state, rollout.share) == (RolloutState.PROMOTED, 1.0)
    rollout.roll_back(1_100)
    assert rollout.share == 0.0
    assert [reason for reason, _ in reasons(rollout)] == [
        "set_by_hand",
        "resumed_by_hand",
        "promoted_by_hand",
        "rolled_back_by_hand",
    ]


@pytest.mark.parametrize(("ratio", "promoted"), [(0.0, 20), (0.01, 20), (0.2, 0)])
def test_good_candidates_pass_and_bad_ones_do_not(ratio: float, promoted: int) -> None:
    done = 0
    for seed in range(20):
        rng = Random(seed)
        rollout = Rollout(RolloutOptions(min_calls=50, step_duration=600, restart=False))
        now = 0.0
        while rollout.state is RolloutState.RUNNING:
            now += 1.0
            drawn = rollout.draw(rng.random(), now)
            failed = rng.random() < (ratio if drawn.candidate else 0.01)
            rollout.record(drawn, now, Result.ERROR if failed else Result.SUCCESS)
        done += rollout.state is RolloutState.PROMOTED
    assert done == promoted


def test_memory_does_not_grow_with_calls_or_time() -> None:
    rollout = Rollout(RolloutOptions(steps=(0.05,), min_calls=1_000, step_duration=60))
    for hour in range(500):
        rollout.record(
            rollout.draw(0.9, hour * 3600), hour * 3600, Result.SUCCESS, first_token=hour % 7 + 0.1
        )
    assert len(rollout._window._slices) <= 21
    assert rollout.baseline.calls == 500


class RolloutMachine(RuleBasedStateMachine):
    """Any calls, ends, hands and times: beside them what must always hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.rollout = Rollout(OPTIONS)
        self.running: list[Drawn] = []
        self.ceiling = 0.05
        self.in_at: dict[float, float] = {}

    @initialize(
        steps=st.sampled_from([(0.05, 0.25, 1.0), (0.5,), (1.0,), (0.1, 0.2, 0.3)]), restart=st.booleans()
    )
    def begin(self, steps: tuple[float, ...], restart: bool) -> None:
        options = RolloutOptions(
            steps=steps, slo=SLO(error_ratio=0.2), min_calls=4, step_duration=20, cool_off=50, restart=restart
        )
        self.options = options
        self.rollout = Rollout(options)
        self.ceiling = steps[0]

    def check_changes(self) -> None:
        steps = list(self.options.steps)
        for change in self.rollout.drain():
            if change.reason == "passed":
                seen = change.candidate
                assert seen.calls >= 4
                assert seen.error_ratio <= 0.2, "stepped on while its SLO was violated"
                if change.to_share != change.from_share:
                    assert change.to_share == steps[steps.index(change.from_share) + 1]
                else:
                    assert change.from_share == steps[-1]
                self.ceiling = change.to_share
            elif change.reason == "error_ratio":
                assert change.candidate.errors >= 3
                assert change.candidate.error_ratio > 0.2
                assert change.to_state is RolloutState.ROLLED_BACK
                self.ceiling = 0.0
            elif change.reason in ("cool_off", "resumed_by_hand"):
                assert change.to_share in steps
                self.ceiling = change.to_share
            else:
                self.ceiling = change.to_share
        assert self.rollout.share == self.ceiling

    @rule(place=st.sampled_from([0.0, 0.04, 0.09, 0.24, 0.3, 0.49, 0.6, 0.999]))
    def draw(self, place: float) -> None:
        drawn = self.rollout.draw(place, self.now)
        self.check_changes()
        assert drawn.candidate == (place < self.rollout.share)
        self.running.append(drawn)

    @rule(data=st.data(), result=st.sampled_from([Result.SUCCESS] * 4 + [Result.ERROR, Result.CLIENT_ERROR]))
    def end(self, data: st.DataObject, result: Result) -> None:
        if self.running:
            drawn = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            before = self.rollout.candidate.calls
            dropped = drawn.run != self.rollout.run
            self.rollout.record(drawn, self.now, result)
            if dropped:
                assert self.rollout.candidate.calls == before
            self.check_changes()

    @rule(results=st.lists(st.booleans(), min_size=1, max_size=12), every=st.sampled_from([0.0, 3.0]))
    def many(self, results: list[bool], every: float) -> None:
        for failed in results:
            drawn = self.rollout.draw(0.0, self.now)
            self.rollout.record(drawn, self.now, Result.ERROR if failed else Result.SUCCESS)
            self.check_changes()
            self.now += every

    @rule(share=st.sampled_from([0.0, 0.07, 0.5, 1.0]))
    def set_share(self, share: float) -> None:
        self.rollout.set_share(share, self.now)
        self.check_changes()
        assert self.rollout.state is RolloutState.HELD

    @rule()
    def promote(self) -> None:
        self.rollout.promote(self.now)
        self.check_changes()

    @rule()
    def roll_back(self) -> None:
        self.rollout.roll_back(self.now)
        self.check_changes()

    @rule()
    def resume(self) -> None:
        self.rollout.resume(self.now)
        self.check_changes()
        assert self.rollout.state is RolloutState.RUNNING

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def a_rollout_that_is_back_has_no_calls(self) -> None:
        if self.rollout.state is RolloutState.ROLLED_BACK:
            assert self.rollout.share == 0
        if self.rollout.state is RolloutState.PROMOTED:
            assert self.rollout.share == 1

    @invariant()
    def totals_are_those_of_the_slices(self) -> None:
        slices = self.rollout._window._slices
        assert self.rollout.candidate.calls == sum(slice_.candidate.calls for slice_ in slices)
        assert self.rollout.baseline.calls == sum(slice_.baseline.calls for slice_ in slices)

    @invariant()
    def whoever_is_in_at_a_share_is_in_at_every_larger_one(self) -> None:
        if self.rollout.restarts_in(self.now) > 0:
            places = [0.0, 0.04, 0.09, 0.24, 0.3, 0.49, 0.6, 0.999]
            inside = [self.rollout.draw(place, self.now).candidate for place in places]
            assert inside == sorted(inside, reverse=True)


TestRollout = RolloutMachine.TestCase
TestRollout.settings = settings(max_examples=60, stateful_step_count=40)
