"""The circuit against a naive model, over random histories of calls.

The model keeps the whole history and works everything out again from it, with none of the circuit's
counters: windows are filtered lists, break lengths are powers, probes are looked up by when they started.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resilient_llm.core.circuit import (
    Admission,
    Circuit,
    CircuitOptions,
    CircuitState,
    Refusal,
    Result,
    Transition,
)

# Multiples of 1/8 with multipliers 1, 1.5 and 2 stay exact in binary: no tolerance is needed anywhere.
EIGHTHS = st.integers(1, 8 * 40).map(lambda eighths: eighths / 8)
HINTS = st.none() | st.sampled_from([0.0, 0.5, 3.0, 20.0, 50.0, math.inf])
FIRST_TOKENS = st.sampled_from([None, 0.0, 1.875, 2.0, 30.0])
SELDOM = st.integers(0, 9).map(lambda tenth: tenth == 9)
HISTORY = 40


class EighthsRandom(Random):
    """Randomness without rounding."""

    def random(self) -> float:
        return self.getrandbits(3) / 8


@st.composite
def circuit_options(draw: st.DrawFn) -> CircuitOptions:
    minimum_throughput = draw(st.integers(1, 6))
    by_calls = draw(st.booleans())
    slow_call_ratio = draw(st.sampled_from([None, 0.25, 0.5, 1.0]))
    break_duration = draw(st.sampled_from([1.0, 4.0]))
    failure_ratio = draw(st.sampled_from([None, 0.25, 0.5, 1.0]))
    no_ratio = failure_ratio is None and slow_call_ratio is None
    return CircuitOptions(
        failure_ratio=failure_ratio,
        minimum_throughput=minimum_throughput,
        sampling_duration=None if by_calls else draw(st.sampled_from([2.5, 20.0, 80.0])),
        sampling_calls=minimum_throughput + draw(st.integers(0, 5)) if by_calls else None,
        consecutive_failures=draw(st.integers(1, 4) if no_ratio else st.none() | st.integers(1, 4)),
        slow_call_ratio=slow_call_ratio,
        slow_call_duration=None if slow_call_ratio is None else 2.0,
        break_duration=break_duration,
        break_multiplier=draw(st.sampled_from([1.0, 1.5, 2.0])),
        max_break_duration=break_duration * draw(st.sampled_from([1, 3])),
        max_retry_after=32.0,
        break_jitter_ratio=draw(st.sampled_from([0.0, 0.5])),
        half_open_max_calls=draw(st.integers(1, 3)),
        success_threshold=draw(st.integers(1, 3)),
        probe_timeout=draw(st.sampled_from([2.0, 10.0])),
    )


@dataclass(slots=True)
class Ticket:
    """What the model remembers of one admission."""

    admission: Admission
    admitted_at: float
    epoch: int
    ended: bool = False


@dataclass(slots=True)
class Model:
    """The circuit as the design describes it."""

    options: CircuitOptions
    jitter: Random
    state: str = "closed"
    epoch: int = 0  # one for each time the state was entered
    breaks: int = 0  # since it was last closed
    earliest_probe: float = -math.inf
    now: float = -math.inf
    calls: list[tuple[float, bool, bool]] = field(default_factory=list)  # since it was last closed
    successes: int = 0
    probes: list[Ticket] = field(default_factory=list)
    transitions: list[tuple[str, str, str, float]] = field(default_factory=list)

    def enter(self, state: str, reason: str, at: float) -> None:
        if state != self.state:
            self.transitions.append((self.state, state, reason, at))
        self.state = state
        self.epoch += 1
        self.calls = []
        self.probes = []
        self.successes = 0

    def close(self, reason: str) -> None:
        self.breaks = 0
        self.earliest_probe = -math.inf
        self.enter("closed", reason, self.now)

    def open(self, reason: str, at: float) -> None:
        options = self.options
        length = min(
            options.break_duration * options.break_multiplier**self.breaks, options.max_break_duration
        )
        length *= 1 + options.break_jitter_ratio * self.jitter.random()
        self.breaks += 1
        self.earliest_probe = max(self.earliest_probe, at + length)
        self.enter("open", reason, at)

    def pass_time(self, now: float) -> None:
        self.now = max(self.now, now)
        leases = sorted(ticket.admitted_at + self.options.probe_timeout for ticket in self.probes)
        if leases and leases[0] <= self.now:
            self.open("probe_timeout", leases[0])

    def wait(self) -> float:
        if self.state == "closed":
            return 0.0
        if self.state == "isolated":
            return math.inf
        if self.earliest_probe > self.now:
            return self.earliest_probe - self.now
        if len(self.probes) >= self.options.half_open_max_calls:
            oldest = min(ticket.admitted_at for ticket in self.probes)
            return min(oldest + self.options.probe_timeout - self.now, self.options.break_duration)
        return 0.0

    def admit(self, admission: Admission) -> Ticket:
        if self.state == "open":
            self.enter("half_open", "break_elapsed", self.now)
        ticket = Ticket(admission, self.now, self.epoch)
        if self.state == "half_open":
            self.probes.append(ticket)
        return ticket

    def hold(self, hint: float | None) -> None:
        self.earliest_probe = max(
            self.earliest_probe, self.now + min(hint or 0.0, self.options.max_retry_after)
        )

    def recent(self) -> list[tuple[float, bool, bool]]:
        if self.options.sampling_calls is not None:
            return self.calls[-self.options.sampling_calls :]
        assert self.options.sampling_duration is not None
        width = self.options.sampling_duration / 10
        return [call for call in self.calls if self.now // width - call[0] // width < 10]

    def record(self, ticket: Ticket, result: Result, first_token: float | None, hint: float | None) -> None:
        if ticket.ended:
            return
        ticket.ended = True
        if ticket.epoch != self.epoch:
            return
        limit = self.options.slow_call_duration
        slow = limit is not None and first_token is not None and first_token >= limit
        if self.state == "half_open":
            self.probes.remove(ticket)
            self.record_probe(result, hint, slow=slow)
        elif self.state == "closed" and result in (Result.SUCCESS, Result.FAILURE):
            self.record_call(result, hint, slow=slow)

    def record_probe(self, result: Result, hint: float | None, *, slow: bool) -> None:
        if result is Result.FAILURE or (result is Result.SUCCESS and slow):
            self.hold(hint)
            self.open("probe_failed", self.now)
        elif result is Result.THROTTLED:
            self.hold(hint)
        elif result is Result.SUCCESS:
            self.successes += 1
            if self.successes == self.options.success_threshold:
                self.close("probe_succeeded")

    def record_call(self, result: Result, hint: float | None, *, slow: bool) -> None:
        options = self.options
        failed = result is Result.FAILURE
        self.calls.append((self.now, failed, slow))
        if failed:
            self.hold(hint)
        recent = self.recent()
        enough = len(recent) >= options.minimum_throughput
        failures = sum(call[1] for call in recent)
        slow_calls = sum(call[2] for call in recent)
        streak = self.calls[-options.consecutive_failures :] if options.consecutive_failures else []
        if failed and enough and options.failure_ratio and failures >= options.failure_ratio * len(recent):
            self.open("failure_ratio", self.now)
        elif failed and len(streak) == options.consecutive_failures and all(call[1] for call in streak):
            self.open("consecutive_failures", self.now)
        elif (
            slow
            and enough
            and options.slow_call_ratio
            and slow_calls >= options.slow_call_ratio * len(recent)
        ):
            self.open("slow_call_ratio", self.now)


class CircuitMachine(RuleBasedStateMachine):
    @initialize(options=circuit_options(), seed=st.integers(0, 3))
    def start(self, options: CircuitOptions, seed: int) -> None:
        self.options = options
        self.rng = EighthsRandom(seed)
        self.circuit = Circuit(options, rng=self.rng)
        self.model = Model(options, EighthsRandom(seed))
        self.clock = 0.0
        self.offset = 0.0  # of the circuit's own clock
        self.tickets: list[Ticket] = []
        self.opened_at = -math.inf
        self.half_open_since = -math.inf
        self.last_snapshot = self.circuit.snapshot(self.now)

    @property
    def now(self) -> float:
        return self.clock + self.offset

    @rule(seconds=EIGHTHS)
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds

    @rule(seconds=EIGHTHS)
    def time_goes_back(self, seconds: float) -> None:
        self.clock -= seconds / 8

    @rule(probes=st.integers(1, 3), apart=st.sampled_from([0.0, 0.5]))
    def come_back_as_told(self, probes: int, apart: float) -> None:
        self.clock = max(self.clock, self.model.now)
        wait = self.circuit.retry_after(self.now)
        if wait < math.inf:
            self.clock += wait
            for _ in range(probes):
                self.admit()
                self.clock += apart

    @rule()
    def admit(self) -> None:
        self.model.pass_time(self.clock)
        wait = self.model.wait()
        was_open = self.model.state == "open"
        decision = self.circuit.admit(self.now)
        if isinstance(decision, Refusal):
            assert decision.retry_after == wait > 0
            assert decision.state == self.model.state
            return
        assert wait == 0
        if was_open:
            assert self.model.now >= self.opened_at + self.options.break_duration
        self.tickets.append(self.model.admit(decision))
        assert decision.is_probe == (self.model.state == "half_open")

    @precondition(lambda self: self.tickets)
    @rule(
        which=st.integers(0, HISTORY),
        again=SELDOM,
        result=st.sampled_from([Result.SUCCESS, Result.FAILURE, *Result]),
        first_token=FIRST_TOKENS,
        hint=HINTS,
    )
    def record(
        self, which: int, again: bool, result: Result, first_token: float | None, hint: float | None
    ) -> None:
        """Results come late, in any order, from any generation, and now and then twice."""
        tickets = [ticket for ticket in self.tickets if ticket.ended == again] or self.tickets
        ticket = tickets[-1 - which % len(tickets)]
        admission = ticket.admission
        before = self.circuit.state
        self.model.pass_time(self.clock)
        self.model.record(ticket, result, first_token, hint)
        self.circuit.record(admission, self.now, result, time_to_first_token=first_token, retry_after=hint)
        if before is not CircuitState.CLOSED and self.circuit.state is CircuitState.CLOSED:
            assert result is Result.SUCCESS
            assert admission.is_probe
            assert ticket.admitted_at >= self.half_open_since

    @rule(
        calls=st.integers(1, 8),
        result=st.sampled_from([Result.SUCCESS, Result.FAILURE]),
        first_token=FIRST_TOKENS,
    )
    def several_calls(self, calls: int, result: Result, first_token: float | None) -> None:
        for _ in range(calls):
            self.admit()
            if self.tickets:
                self.record(0, False, result, first_token, None)

    @precondition(lambda self: self.model.state != "isolated")
    @rule(really=SELDOM, and_close=st.booleans())
    def meddle(self, really: bool, and_close: bool) -> None:
        if really:
            self.model.pass_time(self.clock)
            self.model.enter("isolated", "isolated", self.model.now)
            self.circuit.isolate(self.now)
            self.circuit.isolate(self.now)
            if and_close:
                self.close()

    @precondition(lambda self: self.model.state == "isolated")
    @rule()
    def close(self) -> None:
        self.model.pass_time(self.clock)
        self.model.close("closed_manually")
        self.circuit.close(self.now)

    @rule(really=SELDOM)
    def start_afresh(self, really: bool) -> None:
        if really:
            self.close()

    @precondition(lambda self: self.circuit.state is not CircuitState.CLOSED)
    @rule(offset=st.sampled_from([-1024.0, 0.0, 4096.0]))
    def move_to_another_process(self, offset: float) -> None:
        """A circuit restored from a snapshot, on another clock, goes on as if nothing had happened."""
        self.clock = max(self.clock, self.model.now)
        self.model.pass_time(self.clock)
        snapshot = self.circuit.snapshot(self.now)
        self.check_transitions()
        self.offset = offset
        self.circuit = Circuit(self.options, rng=self.rng)
        self.circuit.restore(snapshot, self.now)
        assert [(moved.to, moved.reason) for moved in self.circuit.drain()] == [
            (snapshot.state, snapshot.reason)
        ]
        assert self.circuit.snapshot(self.now) == snapshot
        self.last_snapshot = snapshot

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.model.pass_time(self.clock)
        assert self.circuit.retry_after(self.now) == self.model.wait()
        assert (self.circuit.retry_after(self.now) == 0) == (self.model.wait() == 0)
        assert self.circuit.state == self.model.state
        assert self.circuit.idle(self.now) == (
            self.model.state == "closed"
            and not self.model.recent()
            and not (self.model.calls and self.model.calls[-1][1])
            and self.model.earliest_probe <= self.clock
        )
        self.check_transitions()

    def check_transitions(self) -> None:
        drained: list[Transition] = self.circuit.drain()
        moved = [(t.from_, t.to, t.reason, t.at - self.offset) for t in drained]
        assert moved == self.model.transitions
        self.model.transitions = []
        for _, state, _, at in moved:
            if state is CircuitState.OPEN:
                self.opened_at = at
            elif state is CircuitState.HALF_OPEN:
                self.half_open_since = at

    @invariant()
    def every_change_that_is_shared_has_a_generation_of_its_own(self) -> None:
        before, after = self.last_snapshot, self.circuit.snapshot(self.now)
        assert after.generation >= before.generation
        if after.generation == before.generation:
            assert (after.state, after.reason, after.next_break) == (
                before.state,
                before.reason,
                before.next_break,
            )
            assert after.successes == before.successes
            assert after.probes.keys() == before.probes.keys()
            if after.state is not CircuitState.CLOSED:
                assert after.wait <= before.wait
        self.last_snapshot = after

    @invariant()
    def never_more_probes_than_allowed(self) -> None:
        if self.circuit.state is not CircuitState.HALF_OPEN:
            return
        out = [
            ticket
            for ticket in self.tickets
            if ticket.admission.is_probe
            and not ticket.admission.settled
            and ticket.admitted_at >= self.half_open_since
            and ticket.admitted_at + self.options.probe_timeout > self.model.now
        ]
        assert len(out) <= self.options.half_open_max_calls


TestCircuitMachine = CircuitMachine.TestCase
TestCircuitMachine.settings = settings(max_examples=200, stateful_step_count=HISTORY, deadline=None)
