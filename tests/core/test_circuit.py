"""The circuit's behaviour by example, and the field cases that its pure core answers (CB-...)."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.circuit import (
    Admission,
    Circuit,
    CircuitOptions,
    CircuitState,
    Reason,
    Refusal,
    Result,
    Transition,
)


def admitted(circuit: Circuit, now: float) -> Admission:
    decision = circuit.admit(now)
    assert isinstance(decision, Admission), decision
    return decision


def refused(circuit: Circuit, now: float) -> Refusal:
    decision = circuit.admit(now)
    assert isinstance(decision, Refusal), decision
    return decision


def call(
    circuit: Circuit,
    now: float,
    result: Result,
    *,
    time_to_first_token: float | None = None,
    retry_after: float | None = None,
) -> None:
    circuit.record(
        admitted(circuit, now), now, result, time_to_first_token=time_to_first_token, retry_after=retry_after
    )


def opened(circuit: Circuit, now: float) -> Circuit:
    """Open a closed circuit by five failures in a row."""
    for _ in range(5):
        call(circuit, now, Result.FAILURE)
    assert circuit.state is CircuitState.OPEN
    return circuit


def half_opened(circuit: Circuit) -> tuple[Circuit, Admission]:
    """Open a circuit at 0 and let its first probe out at 15."""
    return circuit, admitted(opened(circuit, 0.0), 15.0)


def moves(circuit: Circuit) -> list[tuple[str, str, Reason, float]]:
    return [(moved.from_, moved.to, moved.reason, moved.at) for moved in circuit.drain()]


# Triggers


def test_ratio_opens_only_from_the_minimum_throughput_on() -> None:
    circuit = Circuit(CircuitOptions(consecutive_failures=None))
    for second in range(9):
        call(circuit, float(second), Result.FAILURE)
    assert circuit.state is CircuitState.CLOSED
    call(circuit, 9.0, Result.FAILURE)
    assert moves(circuit) == [("closed", "open", "failure_ratio", 9.0)]


@pytest.mark.parametrize("failures", [4, 5])
def test_ratio_opens_when_it_is_reached_and_not_below(failures: int) -> None:
    circuit = Circuit(CircuitOptions(consecutive_failures=None))
    for _ in range(10 - failures):
        call(circuit, 0.0, Result.SUCCESS)
    for _ in range(failures):
        call(circuit, 0.0, Result.FAILURE)
    assert circuit.state is (CircuitState.OPEN if failures == 5 else CircuitState.CLOSED)


def test_a_success_never_opens_a_circuit() -> None:
    circuit = Circuit(CircuitOptions(consecutive_failures=None))
    for _ in range(9):
        call(circuit, 0.0, Result.FAILURE)
    call(circuit, 0.0, Result.SUCCESS)  # the tenth call: nine of ten have failed
    assert circuit.state is CircuitState.CLOSED
    call(circuit, 0.0, Result.FAILURE)
    assert circuit.reason == "failure_ratio"


def test_failures_leave_the_window_with_time() -> None:
    circuit = Circuit(CircuitOptions(consecutive_failures=None))
    for _ in range(9):
        call(circuit, 0.0, Result.FAILURE)
    call(circuit, 60.0, Result.FAILURE)
    assert circuit.state is CircuitState.CLOSED


def test_ratio_over_the_last_calls() -> None:
    """The batch's circuit: a fifth of the last 200 calls, once there were 50."""
    options = CircuitOptions(
        failure_ratio=0.2, minimum_throughput=50, sampling_calls=200, consecutive_failures=None
    )
    assert options.sampling_duration is None
    circuit = Circuit(options)
    for _ in range(200):
        call(circuit, 0.0, Result.SUCCESS)
    for _ in range(39):
        call(circuit, 1e6, Result.FAILURE)
    assert circuit.state is CircuitState.CLOSED
    call(circuit, 1e6, Result.FAILURE)
    assert circuit.reason == "failure_ratio"


def test_consecutive_failures_open_below_the_minimum_throughput() -> None:
    assert moves(opened(Circuit(), 3.0)) == [("closed", "open", "consecutive_failures", 3.0)]


def test_throttled_and_neutral_results_do_not_interrupt_a_run_of_failures() -> None:
    circuit = Circuit()
    for _ in range(4):
        call(circuit, 0.0, Result.FAILURE)
    call(circuit, 0.0, Result.THROTTLED, retry_after=5.0)
    call(circuit, 0.0, Result.NEUTRAL)
    call(circuit, 0.0, Result.FAILURE)
    assert circuit.reason == "consecutive_failures"


def test_slow_calls_open_by_their_time_to_first_token() -> None:
    options = CircuitOptions(slow_call_ratio=0.5, slow_call_duration=2.0)
    circuit = Circuit(options)
    for _ in range(5):
        call(circuit, 0.0, Result.SUCCESS, time_to_first_token=1.9)
    for _ in range(4):
        call(circuit, 0.0, Result.SUCCESS, time_to_first_token=2.0)
    call(circuit, 0.0, Result.SUCCESS)  # unknown is not slow
    assert circuit.state is CircuitState.CLOSED
    call(circuit, 0.0, Result.SUCCESS, time_to_first_token=9.0)
    assert circuit.state is CircuitState.CLOSED  # 5 of 11
    call(circuit, 0.0, Result.SUCCESS, time_to_first_token=9.0)
    assert moves(circuit) == [("closed", "open", "slow_call_ratio", 0.0)]


def test_slow_calls_open_only_from_the_minimum_throughput_on() -> None:
    circuit = Circuit(CircuitOptions(slow_call_ratio=0.5, slow_call_duration=2.0))
    for _ in range(9):
        call(circuit, 0.0, Result.SUCCESS, time_to_first_token=2.0)
    assert circuit.state is CircuitState.CLOSED
    call(circuit, 0.0, Result.SUCCESS, time_to_first_token=2.0)
    assert circuit.reason == "slow_call_ratio"


def test_a_slow_probe_does_not_close() -> None:
    circuit, probe = half_opened(Circuit(CircuitOptions(slow_call_ratio=1.0, slow_call_duration=2.0)))
    circuit.record(probe, 18.0, Result.SUCCESS, time_to_first_token=3.0)
    assert (circuit.state, circuit.reason) == (CircuitState.OPEN, "probe_failed")


def test_time_to_first_token_means_nothing_without_a_slow_call_ratio() -> None:
    circuit, probe = half_opened(Circuit())
    circuit.record(probe, 18.0, Result.SUCCESS, time_to_first_token=1e9)
    assert circuit.state is CircuitState.CLOSED


# Breaks


def test_nothing_is_admitted_before_the_break_has_elapsed() -> None:
    circuit = opened(Circuit(), 100.0)
    refusal = refused(circuit, 112.0)
    assert refusal == Refusal(3.0, CircuitState.OPEN, "consecutive_failures")
    assert circuit.retry_after(112.0) == 3.0
    assert circuit.retry_after(114.9) > 0
    circuit.drain()
    assert circuit.retry_after(115.0) == 0
    assert circuit.drain() == [], "asking is not admitting"
    assert admitted(circuit, 115.0).is_probe
    assert moves(circuit) == [("open", "half_open", "break_elapsed", 115.0)]


def test_breaks_grow_with_each_failed_probe_to_a_maximum_and_start_over_when_closed() -> None:
    circuit = opened(Circuit(), 0.0)
    now, lengths = 0.0, []
    for _ in range(4):
        lengths.append(circuit.retry_after(now))
        now += lengths[-1]
        call(circuit, now, Result.FAILURE)
    assert lengths == [15.0, 22.5, 30.0, 30.0]
    now += circuit.retry_after(now)
    call(circuit, now, Result.SUCCESS)
    assert circuit.state is CircuitState.CLOSED
    opened(circuit, now)
    assert circuit.retry_after(now) == 15.0


def test_breaks_stay_at_the_maximum_for_ever() -> None:
    circuit = opened(Circuit(CircuitOptions(break_multiplier=10.0)), 0.0)
    now = 0.0
    for _ in range(2_000):  # 10.0 ** 2000 is no float
        now += circuit.retry_after(now)
        call(circuit, now, Result.FAILURE)
    assert circuit.retry_after(now) == 30.0


def test_retry_after_on_a_failure_extends_the_break() -> None:
    circuit = Circuit()
    for _ in range(5):
        call(circuit, 0.0, Result.FAILURE, retry_after=40.0)
    assert circuit.retry_after(0.0) == 40.0
    assert circuit.retry_after(39.0) > 0
    call(circuit, 40.0, Result.FAILURE, retry_after=1.0)
    assert circuit.retry_after(40.0) == 22.5, "a hint never shortens a break"


def test_an_absurd_hint_does_not_close_a_target_for_good() -> None:
    circuit = Circuit()
    for hint in (math.inf, 1e300, -5.0, math.nan, None):
        call(circuit, 0.0, Result.FAILURE, retry_after=hint)
    assert circuit.retry_after(0.0) == 3600.0


def test_jitter_only_lengthens_a_break_and_comes_from_the_rng_given() -> None:
    options = CircuitOptions(break_jitter_ratio=0.2)
    lengths = {opened(Circuit(options, rng=Random(seed)), 0.0).retry_after(0.0) for seed in range(50)}
    assert len(lengths) == 50
    assert all(15.0 <= length <= 18.0 for length in lengths)
    assert opened(Circuit(options, rng=Random(7)), 0.0).retry_after(0.0) in lengths
    with pytest.raises(ValueError, match=r"break_jitter_ratio=0\.2: needs an rng"):
        Circuit(options)


# Probes


@pytest.mark.parametrize("result", [Result.NEUTRAL, Result.THROTTLED])
def test_a_probe_without_a_verdict_frees_its_place_at_once(result: Result) -> None:
    circuit, probe = half_opened(Circuit())
    assert circuit.retry_after(16.0) > 0
    circuit.record(probe, 16.0, result)
    assert circuit.state is CircuitState.HALF_OPEN
    assert admitted(circuit, 16.0).is_probe


def test_the_next_probe_after_a_throttled_one_waits_for_the_longest_hint() -> None:
    circuit = Circuit(CircuitOptions(half_open_max_calls=2))
    first, second = admitted(opened(circuit, 0.0), 15.0), admitted(circuit, 15.0)
    circuit.record(first, 16.0, Result.THROTTLED, retry_after=20.0)
    circuit.record(second, 17.0, Result.THROTTLED, retry_after=1.0)
    assert circuit.state is CircuitState.HALF_OPEN
    assert circuit.retry_after(17.0) == 19.0
    assert refused(circuit, 35.9).state is CircuitState.HALF_OPEN
    assert admitted(circuit, 36.0).is_probe


def test_a_circuit_closes_after_the_successes_asked_for() -> None:
    circuit = Circuit(CircuitOptions(success_threshold=3))
    opened(circuit, 0.0)
    call(circuit, 15.0, Result.SUCCESS)
    call(circuit, 16.0, Result.NEUTRAL)
    call(circuit, 16.0, Result.SUCCESS)
    assert circuit.state is CircuitState.HALF_OPEN
    circuit.drain()
    call(circuit, 17.0, Result.SUCCESS)
    assert moves(circuit) == [("half_open", "closed", "probe_succeeded", 17.0)]


def test_successes_before_a_failed_probe_do_not_count_towards_the_next_time() -> None:
    circuit = Circuit(CircuitOptions(success_threshold=2))
    opened(circuit, 0.0)
    call(circuit, 15.0, Result.SUCCESS)
    call(circuit, 15.0, Result.FAILURE)
    call(circuit, 37.5, Result.SUCCESS)
    assert circuit.state is CircuitState.HALF_OPEN


def test_probes_outstanding_when_another_fails_are_dropped() -> None:
    circuit = Circuit(CircuitOptions(half_open_max_calls=3))
    opened(circuit, 0.0)
    first, second, third = (admitted(circuit, 15.0) for _ in range(3))
    circuit.record(second, 16.0, Result.FAILURE)
    circuit.drain()
    before = circuit.snapshot(16.0)
    circuit.record(first, 16.0, Result.SUCCESS)
    circuit.record(third, 16.0, Result.FAILURE, retry_after=500.0)
    assert circuit.snapshot(16.0) == before
    assert circuit.drain() == []


def test_a_lost_probe_is_reported_at_the_end_of_its_lease_whoever_notices_it_when() -> None:
    circuit, probe = half_opened(Circuit())
    circuit.drain()
    assert circuit.retry_after(74.9) > 0
    assert circuit.drain() == []
    later = admitted(circuit, 500.0)
    assert moves(circuit) == [
        ("half_open", "open", "probe_timeout", 75.0),
        ("open", "half_open", "break_elapsed", 500.0),
    ]
    circuit.record(probe, 501.0, Result.SUCCESS)
    assert circuit.drain() == []
    circuit.record(later, 502.0, Result.SUCCESS)
    assert circuit.reason == "probe_succeeded"


def test_the_oldest_of_several_probes_is_lost_first() -> None:
    circuit = Circuit(CircuitOptions(half_open_max_calls=2))
    admitted(opened(circuit, 0.0), 15.0)
    younger = admitted(circuit, 40.0)
    circuit.record(younger, 76.0, Result.SUCCESS)
    assert (circuit.state, circuit.reason) == (CircuitState.OPEN, "probe_timeout")
    assert circuit.retry_after(76.0) == 21.5


def test_the_wait_for_a_busy_probe_is_at_most_a_break() -> None:
    circuit, _ = half_opened(Circuit())
    assert circuit.retry_after(16.0) == 15.0
    assert circuit.retry_after(70.0) == 5.0  # then its lease ends


# Generations


@given(
    late=st.sampled_from([Result.SUCCESS, Result.FAILURE, Result.THROTTLED]),
    at=st.sampled_from([1.0, 15.0, 16.0]),
    half_open=st.booleans(),
)
def test_a_result_from_before_the_circuit_opened_changes_nothing(
    late: Result, at: float, half_open: bool
) -> None:
    circuit = Circuit()
    straggler = admitted(circuit, 0.0)
    opened(circuit, 0.0)
    if half_open and at >= 15.0:
        admitted(circuit, at)
    before = circuit.snapshot(at)
    circuit.drain()
    circuit.record(straggler, at, late, retry_after=100.0)
    assert circuit.snapshot(at) == before
    assert circuit.drain() == []


def test_a_result_from_before_the_circuit_opened_does_not_count_after_it_closed() -> None:
    circuit = Circuit()
    stragglers = [admitted(circuit, 0.0) for _ in range(20)]
    opened(circuit, 0.0)
    call(circuit, 15.0, Result.SUCCESS)
    for straggler in stragglers:
        circuit.record(straggler, 16.0, Result.FAILURE)
    assert circuit.state is CircuitState.CLOSED
    assert circuit.idle(16.0)


def test_an_admission_is_recorded_once() -> None:
    circuit = Circuit()
    admission = admitted(circuit, 0.0)
    for _ in range(5):
        circuit.record(admission, 0.0, Result.FAILURE)
    assert circuit.state is CircuitState.CLOSED
    _, probe = half_opened(circuit := Circuit(CircuitOptions(success_threshold=2)))
    circuit.record(probe, 16.0, Result.SUCCESS)
    circuit.record(probe, 16.0, Result.SUCCESS)
    assert circuit.state is CircuitState.HALF_OPEN


# By hand


def test_an_isolated_circuit_lets_nothing_through_until_it_is_closed() -> None:
    circuit, probe = half_opened(Circuit())
    circuit.isolate(16.0)
    circuit.isolate(17.0)
    circuit.record(probe, 18.0, Result.SUCCESS)
    assert refused(circuit, 1e9) == Refusal(math.inf, CircuitState.ISOLATED, "isolated")
    assert circuit.retry_after(1e9) > 0
    assert circuit.retry_after(1e9) == math.inf
    circuit.close(1e9)
    assert not admitted(circuit, 1e9).is_probe
    assert moves(circuit)[2:] == [
        ("half_open", "isolated", "isolated", 16.0),
        ("isolated", "closed", "closed_manually", 1e9),
    ]


def test_closing_by_hand_starts_afresh() -> None:
    circuit = opened(Circuit(), 0.0)
    call(circuit, 15.0, Result.FAILURE)
    circuit.close(16.0)
    for _ in range(4):
        call(circuit, 16.0, Result.FAILURE, retry_after=500.0)
    circuit.drain()
    circuit.close(17.0)
    assert circuit.drain() == [], "it was closed already"
    for _ in range(4):
        call(circuit, 18.0, Result.FAILURE)
    assert circuit.state is CircuitState.CLOSED
    call(circuit, 18.0, Result.FAILURE)
    assert circuit.retry_after(18.0) == 15.0


# Time, idleness, sharing


def test_time_going_back_is_clamped() -> None:
    circuit = Circuit()
    for now in (100.0, 50.0, 20.0, 0.0, 0.0):
        call(circuit, now, Result.FAILURE)
    assert moves(circuit) == [("closed", "open", "consecutive_failures", 100.0)]
    assert circuit.retry_after(0.0) == 15.0
    probe = admitted(circuit, 115.0)
    circuit.record(probe, 3.0, Result.FAILURE)
    assert moves(circuit)[1:] == [("half_open", "open", "probe_failed", 115.0)]


def test_a_circuit_is_idle_when_forgetting_it_loses_nothing() -> None:
    circuit = Circuit()
    assert circuit.idle(0.0)
    call(circuit, 0.0, Result.SUCCESS)
    assert not circuit.idle(53.0)
    assert circuit.idle(60.0)
    call(circuit, 60.0, Result.FAILURE)
    assert not circuit.idle(1e6), "a run of failures has no age"
    call(circuit, 1e6, Result.FAILURE, retry_after=1_000.0)
    call(circuit, 1e6, Result.SUCCESS)
    assert not circuit.idle(1e6 + 999.0), "the hint would extend the next break"
    assert circuit.idle(1e6 + 1_000.0)
    circuit.isolate(2e6)
    assert not circuit.idle(3e6), "somebody isolated it"


def test_two_processes_share_one_probe_by_compare_and_set() -> None:
    here, there = opened(Circuit(), 0.0), Circuit()
    shared = here.snapshot(5.0)
    there.restore(shared, 1_005.0)  # its clock is 1000 s ahead
    assert there.retry_after(1_005.0) == here.retry_after(5.0) == 10.0

    ours, theirs = admitted(here, 15.0), admitted(there, 1_015.0)
    assert here.generation > shared.generation
    shared = here.snapshot(15.0)  # the store takes this one: it still holds the generation both started from
    there.restore(shared, 1_015.0)  # ... and so not the other's, whose admission is void
    assert theirs.generation == ours.generation
    assert isinstance(there.admit(1_016.0), Refusal)

    here.record(ours, 17.0, Result.SUCCESS)
    there.drain()
    there.restore(here.snapshot(17.0), 1_017.0)
    assert there.drain() == [
        Transition(CircuitState.HALF_OPEN, CircuitState.CLOSED, "probe_succeeded", 1_017.0)
    ]
    assert not admitted(there, 1_017.0).is_probe


def test_restoring_the_generation_one_is_in_keeps_what_was_counted_locally() -> None:
    circuit = Circuit()
    for _ in range(4):
        call(circuit, 0.0, Result.FAILURE)
    circuit.restore(Circuit().snapshot(0.0), 0.0)
    call(circuit, 0.0, Result.FAILURE)
    assert circuit.state is CircuitState.OPEN


def test_restoring_a_later_generation_drops_what_was_counted_locally() -> None:
    elsewhere, circuit = opened(Circuit(), 0.0), Circuit()
    elsewhere.close(1.0)
    straggler = admitted(circuit, 0.0)
    for _ in range(4):
        call(circuit, 0.0, Result.FAILURE)
    circuit.restore(elsewhere.snapshot(1.0), 1.0)
    circuit.record(straggler, 1.0, Result.FAILURE)
    assert circuit.idle(1.0)


# Options


def test_defaults_are_those_of_the_design() -> None:
    options = CircuitOptions()
    assert (options.failure_ratio, options.minimum_throughput, options.sampling_duration) == (0.5, 10, 60.0)
    assert (options.break_duration, options.break_multiplier, options.max_break_duration) == (15.0, 1.5, 30.0)
    assert (options.consecutive_failures, options.half_open_max_calls, options.success_threshold) == (5, 1, 1)
    assert (options.slow_call_ratio, options.slow_call_duration, options.probe_timeout) == (None, None, 60.0)
    with pytest.raises(FrozenInstanceError):
        options.minimum_throughput = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failure_ratio": 0.0}, "failure_ratio=0.0: must be above 0 and at most 1"),
        ({"failure_ratio": 1.5}, "failure_ratio=1.5: must be above 0 and at most 1"),
        ({"failure_ratio": math.nan}, "failure_ratio=nan: must be above 0 and at most 1"),
        ({"minimum_throughput": 0}, "minimum_throughput=0: must be at least 1"),
        ({"consecutive_failures": 0}, "consecutive_failures=0: must be at least 1"),
        ({"half_open_max_calls": 0}, "half_open_max_calls=0: must be at least 1"),
        ({"success_threshold": -1}, "success_threshold=-1: must be at least 1"),
        ({"sampling_calls": 0}, "sampling_calls=0: must be at least 1"),
        ({"sampling_duration": 0.0}, "sampling_duration=0.0: must be finite seconds above 0"),
        ({"break_duration": math.inf}, "break_duration=inf: must be finite seconds above 0"),
        ({"probe_timeout": math.nan}, "probe_timeout=nan: must be finite seconds above 0"),
        ({"max_retry_after": 0.0}, "max_retry_after=0.0: must be finite seconds above 0"),
        ({"break_multiplier": 0.9}, "break_multiplier=0.9: must be finite and at least 1"),
        ({"break_jitter_ratio": 1.1}, "break_jitter_ratio=1.1: must be between 0 and 1"),
        ({"break_duration": 31.0}, "max_break_duration=30.0: must be at least break_duration=31.0"),
        (
            {"sampling_duration": 30.0, "sampling_calls": 100},
            "sampling_calls=100: must be left out when sampling_duration=30.0 is given: there is one window",
        ),
        (
            {"sampling_calls": 9},
            "minimum_throughput=10: must be at most sampling_calls=9, or no ratio would ever count",
        ),
        (
            {"slow_call_ratio": 0.5},
            "slow_call_duration=None: must be given when, and only when, slow_call_ratio is (it is 0.5)",
        ),
        (
            {"slow_call_duration": 2.0},
            "slow_call_duration=2.0: must be given when, and only when, slow_call_ratio is (it is None)",
        ),
        (
            {"failure_ratio": None, "consecutive_failures": None},
            (
                "consecutive_failures=None: must be given when both ratios are off, "
                "or nothing would open the circuit"
            ),
        ),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        CircuitOptions(**options)  # type: ignore[arg-type]
    assert str(caught.value) == message


# Field cases


def test_cb_01_results_that_are_the_requests_own_fault_leave_the_circuit_closed() -> None:
    circuit = Circuit()
    for second in range(10):
        call(circuit, float(second), Result.NEUTRAL)
    assert circuit.idle(10.0)
    call(circuit, 10.0, Result.SUCCESS)


def test_cb_03_a_cancelled_probe_frees_its_place_and_the_next_call_probes() -> None:
    circuit, probe = half_opened(Circuit())
    for second in range(1_000):
        circuit.record(probe, 15.0 + second, Result.NEUTRAL)
        probe = admitted(circuit, 15.0 + second)
    circuit.record(probe, 1_015.0, Result.SUCCESS)
    assert circuit.state is CircuitState.CLOSED


def test_cb_03_a_probe_that_hangs_is_presumed_lost_and_its_late_result_dropped() -> None:
    circuit, probe = half_opened(Circuit())
    assert circuit.retry_after(74.0) > 0
    circuit.record(probe, 75.0, Result.SUCCESS)  # the lease ends with its 60th second
    assert (circuit.state, circuit.reason) == (CircuitState.OPEN, "probe_timeout")
    assert circuit.retry_after(75.0) == 22.5
    assert admitted(circuit, 97.5).is_probe


@pytest.mark.parametrize("probes", [1, 3])
def test_cb_06_of_a_thousand_calls_at_the_instant_of_half_open_only_the_probes_pass(probes: int) -> None:
    circuit = Circuit(CircuitOptions(half_open_max_calls=probes))
    opened(circuit, 0.0)
    decisions = [circuit.admit(15.0) for _ in range(1_000)]
    out = [decision for decision in decisions if isinstance(decision, Admission)]
    assert len(out) == probes
    assert all(admission.is_probe for admission in out)
    circuit.record(out[0], 16.0, Result.FAILURE)
    assert circuit.state is CircuitState.OPEN
    assert circuit.retry_after(16.0) == 22.5, "a fresh timer, from the failure on"


def test_cb_07_one_failure_in_twenty_for_an_hour_does_not_open() -> None:
    circuit = Circuit()
    for second in range(3_600):
        call(circuit, float(second), Result.FAILURE if second % 20 == 0 else Result.SUCCESS)
    assert circuit.drain() == []


def test_cb_08_throttled_calls_neither_open_nor_close() -> None:
    circuit = Circuit()
    for second in range(10):
        call(circuit, float(second), Result.THROTTLED, retry_after=1.0)
    assert circuit.idle(10.0)
    circuit, probe = half_opened(Circuit())
    circuit.record(probe, 16.0, Result.THROTTLED, retry_after=1.0)
    assert circuit.state is CircuitState.HALF_OPEN
    assert circuit.retry_after(16.0) == 1.0


@pytest.mark.parametrize("hints", [(1.0, 60.0), (60.0, 1.0)])
def test_cb_10_the_later_of_two_hints_stands(hints: tuple[float, float]) -> None:
    first, second = hints
    circuit = Circuit(CircuitOptions(consecutive_failures=2))
    slow_call = admitted(circuit, 0.0)
    call(circuit, 0.0, Result.FAILURE, retry_after=first)
    circuit.record(slow_call, 0.25, Result.FAILURE, retry_after=second)
    until = max(0.0 + first, 0.25 + second)
    assert circuit.retry_after(until - 0.01) > 0
    assert circuit.retry_after(until) == 0


def test_cb_11_calls_in_flight_count_when_they_end() -> None:
    circuit = Circuit()
    streams = [admitted(circuit, 0.0) for _ in range(6)]
    assert circuit.idle(30.0), "headers are no outcome"
    circuit.record(streams.pop(), 30.0, Result.NEUTRAL)  # its client went away
    for stream in streams:
        circuit.record(stream, 30.0, Result.FAILURE)
    assert circuit.reason == "consecutive_failures"
