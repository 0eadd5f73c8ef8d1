"""The circuit breaker's state machine, as a pure function of events and their times.

It decides who may call and what a result changes. It never waits, reads no clock, emits nothing and
knows no HTTP: what counts as a failure was decided before a result gets here, and the shell in `policies`
emits the transitions queued here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random
from types import MappingProxyType
from typing import cast

from resilient_llm.core.circuit_options import CircuitOptions
from resilient_llm.core.circuit_state import CircuitSnapshot, CircuitState, Reason, Transition
from resilient_llm.core.window import CountWindow, TimeWindow, Window

__all__ = [
    "Admission",
    "Circuit",
    "CircuitOptions",
    "CircuitSnapshot",
    "CircuitState",
    "Reason",
    "Refusal",
    "Result",
    "Transition",
]


class Result(Enum):
    """Say how an admitted call ended, as far as a circuit cares."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"
    """It says nothing about the target: cancelled, refused further in, or the request's own fault."""
    THROTTLED = "throttled"
    """The target is healthy and busy (429): neutral, but the next probe waits for the hint."""


# Reading a member through its class costs eight times a global on 3.11, several times per call.
_CLOSED = CircuitState.CLOSED
_OPEN = CircuitState.OPEN
_HALF_OPEN = CircuitState.HALF_OPEN
_ISOLATED = CircuitState.ISOLATED
_SUCCESS = Result.SUCCESS
_FAILURE = Result.FAILURE
_THROTTLED = Result.THROTTLED

# There is a circuit for every key: what most of them have in common is made once.
_NEVER = -math.inf
_NO_PROBES: Mapping[int, float] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Admission:
    """Let one call through; hand it back to `Circuit.record` with the call's result."""

    generation: int
    is_probe: bool = False
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refuse one call: `retry_after` is in seconds, infinite when the circuit is isolated."""

    retry_after: float
    state: CircuitState
    reason: Reason


class Circuit:
    """Admit calls while their target is well, and find out by few probes when it is well again.

    Ask `admit` last, just before sending, and `record` what came of it once the reply has been read to its
    end. Times are in seconds on one clock; an earlier time than the last counts as that one. Drain
    `transitions` after any method, for even a question may find that a probe was lost.

    The triggers are those of Polly v8 (ratio with a minimum throughput), resilience4j (slow calls) and
    Finagle (consecutive failures); results of an older generation are dropped as in gobreaker; the lease of
    a probe is resilience4j's `maxWaitDurationInHalfOpenState`, for each probe by itself.
    """

    __slots__ = (
        "_failures_in_a_row",
        "_next_break",
        "_not_before",
        "_now",
        "_options",
        "_probes",
        "_rng",
        "_successes",
        "_window",
        "generation",
        "reason",
        "state",
        "transitions",
    )

    def __init__(self, options: CircuitOptions | None = None, *, rng: Random | None = None) -> None:
        self._options = options = options or CircuitOptions()
        if options.break_jitter_ratio and rng is None:
            raise ValueError(f"break_jitter_ratio={options.break_jitter_ratio!r}: needs an rng")
        self._rng = rng
        self.state = _CLOSED
        self.reason: Reason = "initial"
        self.generation = 0
        """Counts the changes of everything a snapshot holds; so it names an outstanding probe, too."""
        self.transitions: list[Transition] = []
        self._now = _NEVER
        self._not_before = _NEVER  # closed: what failures asked for; else no probe starts before it
        self._next_break = options.break_duration
        self._successes = 0
        self._probes = _NO_PROBES  # generation of admission -> end of its lease; replaced, never changed
        self._failures_in_a_row = 0
        size = options.sampling_calls
        duration = cast("float", options.sampling_duration)  # one of the two is set
        self._window: Window = TimeWindow(duration) if size is None else CountWindow(size)

    def retry_after(self, now: float) -> float:
        """Give the seconds until a call may be let through: 0 now, infinite when isolated.

        While all probes are out it is a guess, the length of a break, for their results decide.
        """
        return 0.0 if self.state is _CLOSED else self._wait(self._advance(now))

    def admit(self, now: float) -> Admission | Refusal:
        """Let a call through, as a probe unless the circuit is closed, or refuse it."""
        if self.state is _CLOSED:
            return Admission(self.generation)
        now = self._advance(now)
        if wait := self._wait(now):
            return Refusal(wait, self.state, self.reason)
        if self.state is _OPEN:
            self._move(_HALF_OPEN, "break_elapsed", now)
        self.generation += 1
        self._probes = {**self._probes, self.generation: now + self._options.probe_timeout}
        return Admission(self.generation, is_probe=True)

    def record(
        self,
        admission: Admission,
        now: float,
        result: Result,
        time_to_first_token: float | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Take note of how an admitted call ended, once; what no longer concerns this generation is dropped.

        `time_to_first_token` is in seconds, or how long the call lasted if none came; `retry_after`, in
        seconds, is the provider's hint on a failure or a throttled call.
        """
        if admission.settled:
            return
        admission.settled = True
        if self.state is not _CLOSED:
            self._record_probe(admission, now, result, time_to_first_token, retry_after)
            return
        failed = result is _FAILURE
        if admission.generation != self.generation or not (failed or result is _SUCCESS):
            return
        if now < self._now:
            now = self._now
        else:
            self._now = now
        limit = self._options.slow_call_duration
        slow = limit is not None and time_to_first_token is not None and time_to_first_token >= limit
        self._window.record(now, failed=failed, slow=slow)
        if failed:
            self._failures_in_a_row += 1
            self._hold(now, retry_after)
        else:
            self._failures_in_a_row = 0
        # A success never opens a circuit, even when it is the call that completes the minimum throughput.
        if (failed or slow) and (reason := self._trigger(failed=failed, slow=slow)):
            self._open(now, reason)

    def isolate(self, now: float) -> None:
        """Let nothing through until `close`."""
        now = self._advance(now)
        if self.state is not _ISOLATED:
            self._move(_ISOLATED, "isolated", now)

    def close(self, now: float) -> None:
        """Let everything through and start afresh, with nothing counted and the first break's length."""
        self._reset(self._advance(now), "closed_manually")

    def idle(self, now: float) -> bool:
        """Tell whether a new circuit in place of this one would decide the same."""
        now = self._advance(now)
        self._window.expire(now)
        counted = self._window.calls or self._failures_in_a_row or self._not_before > now
        return self.state is _CLOSED and not counted

    def drain(self) -> list[Transition]:
        """Hand over the transitions since the last time, oldest first."""
        drained, self.transitions = self.transitions, []
        return drained

    def snapshot(self, now: float) -> CircuitSnapshot:
        """Give what the processes that share this circuit must agree on; the window stays local."""
        now = self._advance(now)
        return CircuitSnapshot(
            generation=self.generation,
            state=self.state,
            reason=self.reason,
            wait=max(0.0, self._not_before - now),
            next_break=self._next_break,
            successes=self._successes,
            probes={generation: lease - now for generation, lease in self._probes.items()},
        )

    def restore(self, snapshot: CircuitSnapshot, now: float) -> None:
        """Take over what was agreed on, in place of this circuit's own state.

        An admission from a generation that lost the compare-and-set is void: do not use it.
        """
        now = self._now = max(now, self._now)
        if not (snapshot.state is self.state is _CLOSED and snapshot.generation == self.generation):
            self._move(snapshot.state, snapshot.reason, now)
        self.generation = snapshot.generation
        self._not_before = now + snapshot.wait
        self._next_break = snapshot.next_break
        self._successes = snapshot.successes
        self._probes = {generation: now + left for generation, left in snapshot.probes.items()}

    def _record_probe(
        self,
        admission: Admission,
        now: float,
        result: Result,
        time_to_first_token: float | None,
        retry_after: float | None,
    ) -> None:
        now = self._advance(now)
        if admission.generation not in self._probes:
            return
        self._probes = {
            probe: lease for probe, lease in self._probes.items() if probe != admission.generation
        }
        self.generation += 1
        limit = self._options.slow_call_duration
        slow = limit is not None and time_to_first_token is not None and time_to_first_token >= limit
        if result is _FAILURE or (result is _SUCCESS and slow):
            # A slow probe has not shown that the target is well: closing would only open again.
            self._hold(now, retry_after)
            self._open(now, "probe_failed")
        elif result is _SUCCESS:
            self._successes += 1
            if self._successes >= self._options.success_threshold:
                self._reset(now, "probe_succeeded")
        elif result is _THROTTLED:
            self._hold(now, retry_after)

    def _advance(self, now: float) -> float:
        """Let time pass, never backwards; a probe whose lease has run out is a failed one."""
        if now < self._now:
            now = self._now
        else:
            self._now = now
        if self._probes and (lease := min(self._probes.values())) <= now:
            self._open(lease, "probe_timeout")  # when it was lost, not when somebody noticed
        return now

    def _wait(self, now: float) -> float:
        """Give the seconds until a call may be let through by a circuit that is not closed."""
        if self.state is _ISOLATED:
            return math.inf
        if now < self._not_before:
            return self._not_before - now
        if len(self._probes) < self._options.half_open_max_calls:
            return 0.0
        return min(self._options.break_duration, min(self._probes.values()) - now)

    def _trigger(self, *, failed: bool, slow: bool) -> Reason | None:
        options, window = self._options, self._window
        enough = window.calls >= options.minimum_throughput
        ratio = options.failure_ratio
        if failed and enough and ratio is not None and window.failures / window.calls >= ratio:
            return "failure_ratio"
        limit = options.consecutive_failures
        if failed and limit is not None and self._failures_in_a_row >= limit:
            return "consecutive_failures"
        ratio = options.slow_call_ratio
        if slow and enough and ratio is not None and window.slow / window.calls >= ratio:
            return "slow_call_ratio"
        return None

    def _hold(self, now: float, retry_after: float | None) -> None:
        """Put off the next probe for as long as the provider asks; the longest of several hints counts."""
        if retry_after is not None:
            self._not_before = max(self._not_before, now + min(retry_after, self._options.max_retry_after))

    def _open(self, at: float, reason: Reason) -> None:
        options = self._options
        length = self._next_break
        if self._rng is not None:
            length += length * options.break_jitter_ratio * self._rng.random()
        self._not_before = max(self._not_before, at + length)
        self._next_break = min(self._next_break * options.break_multiplier, options.max_break_duration)
        self._move(_OPEN, reason, at)

    def _reset(self, at: float, reason: Reason) -> None:
        self._not_before = _NEVER
        self._next_break = self._options.break_duration
        self._move(_CLOSED, reason, at)

    def _move(self, state: CircuitState, reason: Reason, at: float) -> None:
        """Begin a new generation: nothing counted, no probe out."""
        if state is not self.state:
            self.transitions.append(Transition(self.state, state, reason, at))
        self.state = state
        self.reason = reason
        self.generation += 1
        self._successes = 0
        self._probes = _NO_PROBES
        self._failures_in_a_row = 0
        self._window.clear()
