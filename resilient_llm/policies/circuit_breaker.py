"""Circuits: stop asking a target that fails, and find out by few probes when it is well again."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from resilient_llm._options import at_least, flag, instance_of, label, number, store_of
from resilient_llm.core.circuit import Admission, Circuit, CircuitOptions, CircuitState, Refusal, Result
from resilient_llm.errors import CircuitOpenError, ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.policies._keyed import MAX_REPORTED, OVERFLOW, Key, Keyed, is_of_target, named, series
from resilient_llm.policies._shared_circuits import SharedCircuit, SharedCircuits
from resilient_llm.telemetry.names import BREAKER_NAME, BREAKER_STATE

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.stores.protocol_circuits import CircuitStore
    from resilient_llm.telemetry import Telemetry

__all__ = ["CircuitBreaker"]

_CLOSED = CircuitState.CLOSED
_SUCCEEDED = Verdict.SUCCESS
_SUCCESS = Result.SUCCESS
_FAILURE = Result.FAILURE
_RESULTS = {
    Verdict.FAILURE: _FAILURE,
    Verdict.THROTTLED: Result.THROTTLED,
}
_GAUGE = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2, CircuitState.ISOLATED: 3}
_OPTIONAL = (
    "failure_ratio",
    "sampling_duration",
    "sampling_calls",
    "consecutive_failures",
    "slow_call_ratio",
    "slow_call_duration",
)
_REQUIRED = (
    "minimum_throughput",
    "break_duration",
    "break_multiplier",
    "max_break_duration",
    "break_jitter_ratio",
    "half_open_max_calls",
    "success_threshold",
    "probe_timeout",
)
_COUNTS = (
    "minimum_throughput",
    "sampling_calls",
    "consecutive_failures",
    "half_open_max_calls",
    "success_threshold",
)


class _KeyedCircuit:
    """A circuit, the key it is for, and the error that last counted against it."""

    __slots__ = ("circuit", "key", "last_error", "shared")

    def __init__(self, key: Hashable, options: CircuitOptions, rng: Random) -> None:
        self.key = key
        self.circuit = Circuit(options, rng=rng)
        self.shared: SharedCircuit | None = None
        self.last_error: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class CircuitBreaker:
    """Refuse calls to a target while it is failing.

    The options and their defaults are those of `CircuitOptions`. Each `key` has a circuit of its own. An
    attempt counts when its reply has been read to its end: failures of the target do, throttling (429),
    the request's own faults and cancellations do not. With `dry_run` everything is counted and reported,
    nothing refused. With a `store` circuits are shared, by `name`, with all processes that use it: their states and
    their probes are, and what was counted is not. Raises `CircuitOpenError` with `retry_after`.
    """

    failure_ratio: float | None = 0.5
    minimum_throughput: int = 10
    sampling_duration: float | None = None
    sampling_calls: int | None = None
    consecutive_failures: int | None = 5
    slow_call_ratio: float | None = None
    slow_call_duration: float | None = None
    break_duration: float = 15.0
    break_multiplier: float = 1.5
    max_break_duration: float = 30.0
    break_jitter_ratio: float = 0.0
    half_open_max_calls: int = 1
    success_threshold: int = 1
    probe_timeout: float = 60.0
    key: Key = "target"
    max_keys: int = 10_000
    dry_run: bool = False
    random: Random = field(default_factory=Random, repr=False)
    store: CircuitStore | None = None
    name: str = "circuit"
    placement: ClassVar[Placement] = Placement.BREAKER
    _circuits: Keyed[_KeyedCircuit] = field(init=False, repr=False)
    _shared: SharedCircuits | None = field(init=False, repr=False)
    _telemetries: WeakSet[Telemetry] = field(init=False, repr=False, default_factory=WeakSet)

    def __post_init__(self) -> None:
        at_least(1, max_keys=self.max_keys)
        flag(dry_run=self.dry_run)
        label(name=self.name)
        for option in _COUNTS:
            if getattr(self, option) is not None or option in _REQUIRED:
                at_least(1, **{option: getattr(self, option)})
        instance_of(Random, random=self.random)
        store_of("circuits", "circuits", self.store)
        number(-math.inf, math.inf, none=True, **{option: getattr(self, option) for option in _OPTIONAL})
        number(-math.inf, math.inf, **{option: getattr(self, option) for option in _REQUIRED})
        try:
            options = self._options()  # says what of a number is allowed
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        circuits = Keyed(
            self.name,
            self.key,
            lambda key: self._new(key, options),
            idle=lambda keyed, now: keyed.circuit.idle(now),
            max_keys=self.max_keys,
            in_store=self.store is not None,
        )
        shared = None
        if self.store is not None:
            shared = SharedCircuits(self.store, self.name, options, max_keys=self.max_keys)
        object.__setattr__(self, "_circuits", circuits)
        object.__setattr__(self, "_shared", shared)

    def _new(self, key: Hashable, options: CircuitOptions) -> _KeyedCircuit:
        keyed = _KeyedCircuit(key, options, self.random)
        if self._shared is not None and key is not OVERFLOW:
            keyed.shared = self._shared.share(key, keyed.circuit)
        return keyed

    def _options(self) -> CircuitOptions:
        return CircuitOptions(
            failure_ratio=self.failure_ratio,
            minimum_throughput=self.minimum_throughput,
            sampling_duration=self.sampling_duration,
            sampling_calls=self.sampling_calls,
            consecutive_failures=self.consecutive_failures,
            slow_call_ratio=self.slow_call_ratio,
            slow_call_duration=self.slow_call_duration,
            break_duration=self.break_duration,
            break_multiplier=self.break_multiplier,
            max_break_duration=self.max_break_duration,
            break_jitter_ratio=self.break_jitter_ratio,
            half_open_max_calls=self.half_open_max_calls,
            success_threshold=self.success_threshold,
            probe_timeout=self.probe_timeout,
        )

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Let an attempt through, or refuse it at once."""
        keyed = self._circuits.of(call)
        if self._shared is not None and keyed.shared is not None:
            return self._ask(call, call_next, keyed, self._shared.admit(call, keyed.shared))
        admission = keyed.circuit.admit(call.loop.time())
        if keyed.circuit.transitions or isinstance(admission, Refusal):
            self._act(call, keyed, admission)
        else:
            call.on_finish(partial(self._record, call, keyed, admission))
        return call_next(call)

    async def _ask(
        self,
        call: Call,
        call_next: CallNext,
        keyed: _KeyedCircuit,
        admission: Awaitable[Admission | Refusal],
    ) -> Reply:
        self._act(call, keyed, await admission)
        return await call_next(call)

    def _act(self, call: Call, keyed: _KeyedCircuit, admission: Admission | Refusal) -> None:
        if keyed.circuit.transitions:
            self._report(call, keyed)
        if isinstance(admission, Refusal):
            error = self._refused(keyed, admission)
            call.telemetry.rejected(call, error, dry_run=self.dry_run)
            if not self.dry_run:
                raise error
        else:
            call.on_finish(partial(self._record, call, keyed, admission))

    def _record(self, call: Call, keyed: _KeyedCircuit, admission: Admission, outcome: Outcome) -> None:
        now, circuit = call.ended, keyed.circuit
        if outcome.verdict is _SUCCEEDED:
            result = _SUCCESS
        else:
            result = _RESULTS.get(outcome.verdict, Result.NEUTRAL)
            if result is _FAILURE:
                keyed.last_error = outcome.error_type
        to_first = call.first_content
        if to_first is None:
            to_first = now - call.started
        if self._shared is None or keyed.shared is None:
            circuit.record(admission, now, result, to_first, outcome.retry_after)
        else:
            self._shared.record(
                keyed.shared,
                admission,
                now,
                result,
                time_to_first_token=to_first,
                retry_after=outcome.retry_after,
            )
        if circuit.transitions:
            self._report(call, keyed)

    def _report(self, call: Call, keyed: _KeyedCircuit) -> None:
        for change in keyed.circuit.drain():
            call.telemetry.breaker_changed(
                call, series(self.name, self.key, keyed.key), change.from_, change.to, change.reason
            )

    def _refused(self, keyed: _KeyedCircuit, refusal: Refusal) -> CircuitOpenError:
        name = named(self.name, keyed.key)
        isolated = refusal.state is CircuitState.ISOLATED
        cause = (
            "it was isolated by hand"
            if isolated
            else f"{refusal.reason}, last error: {self._last_error(keyed)}"
        )
        return CircuitOpenError(
            f"{name} is {refusal.state.value} ({cause})",
            retry_after=None if isolated else refusal.retry_after,
            name=self.name,
        )

    def _last_error(self, keyed: _KeyedCircuit) -> str | None:
        elsewhere = keyed.last_error is None and keyed.shared is not None
        return "another process's" if elsewhere else keyed.last_error

    def reopens_in(self, call: Call) -> float:
        """Give the seconds until the call's circuit would let an attempt through, as things stand; 0 is now."""
        if self.dry_run:
            return 0.0
        keyed = self._circuits.of(call)
        if self._shared is not None and keyed.shared is not None:
            return self._shared.look(call, keyed.shared)
        circuit = keyed.circuit
        return 0.0 if circuit.state is _CLOSED else circuit.retry_after(call.loop.time())

    def state(self, key: Hashable) -> CircuitState:
        """Give the state of a key's circuit; an open one whose break has elapsed is still `OPEN` until a call comes."""
        keyed = self._circuits.peek(key)
        if keyed is not None:
            return keyed.circuit.state
        return CircuitState.CLOSED if self._shared is None else self._shared.state(key)

    def states(self) -> Mapping[Hashable, CircuitState]:
        """Give the state of every circuit there is, by its key."""
        return {keyed.key: keyed.circuit.state for keyed in self._circuits.values()}

    def keys_of(self, target: str) -> list[Hashable]:
        """Give the keys of the circuits there are for a target."""
        return [one.key for one in self._circuits.values() if is_of_target(self.key, one.key, target)]

    def isolate(self, key: Hashable) -> None:
        """Let nothing through for a key until `close`.

        From any thread; in another it takes effect as soon as the event loop comes to it. Raises `EventLoopError`
        where no event loop runs, neither here nor the one this breaker belongs to.
        """
        self._circuits.change_one(key, self._isolate)

    def _isolate(self, keyed: _KeyedCircuit, now: float) -> None:
        self._change(keyed, keyed.circuit.isolate, now)
        self._report_by_hand(keyed)

    def close(self, key: Hashable) -> None:
        """Let everything through for a key, with nothing counted; from any thread, as `isolate`."""
        self._circuits.change_one(key, self._close)

    def _close(self, keyed: _KeyedCircuit, now: float) -> None:
        self._change(keyed, keyed.circuit.close, now)
        self._report_by_hand(keyed)

    def _change(self, keyed: _KeyedCircuit, change: Callable[[float], None], now: float) -> None:
        if self._shared is None or keyed.shared is None:
            change(now)
        else:
            self._shared.change(keyed.shared, change, now)

    def _report_by_hand(self, keyed: _KeyedCircuit) -> None:
        for change in keyed.circuit.drain():
            for telemetry in list(self._telemetries)[
                :1
            ]:  # pipelines that share this breaker share the counter
                telemetry.transition(
                    series(self.name, self.key, keyed.key), change.from_, change.to, change.reason
                )

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauge `breaker.state`: 0 closed, 1 half-open, 2 open, 3 isolated."""
        self._telemetries.add(telemetry)
        if self.store is not None:
            self.store.guard.observe(telemetry)
        telemetry.observe(
            BREAKER_STATE, self._observe, "1", "0 closed, 1 half-open, 2 open, 3 isolated", merge=max
        )

    def _observe(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        for _, keyed in zip(range(MAX_REPORTED), self._circuits.values(), strict=False):
            yield _GAUGE[keyed.circuit.state], {BREAKER_NAME: series(self.name, self.key, keyed.key)}
