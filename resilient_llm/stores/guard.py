"""What protects calls from their store: it is given up on quickly, and asked again by few.

A circuit of its own decides whether the store is asked at all. What a policy does without it, each policy says; how the
store is reached must not enter here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from resilient_llm._options import label, one_of
from resilient_llm.core.circuit import Admission, Circuit, CircuitOptions, Refusal, Result
from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.errors import StoreUnavailableError
from resilient_llm.telemetry import Telemetry
from resilient_llm.telemetry.names import STORE_NAME

__all__ = ["OnStoreError", "StoreChange", "StoreGuard"]

OnStoreError: TypeAlias = Literal["local", "open", "closed"]
"""What calls meet while the store cannot decide: this process's share, no limit, or a refusal (503)."""

logger = logging.getLogger("resilient_llm")

_CIRCUIT: Final = CircuitOptions(
    failure_ratio=0.5,
    minimum_throughput=10,
    sampling_duration=5.0,
    consecutive_failures=5,
    break_duration=0.5,
    break_multiplier=2.0,
    max_break_duration=5.0,
    probe_timeout=5.0,
)
"""Shorter than a target's: a probe costs one call its store timeout, and nobody's answer depends on it."""

_TELL_AGAIN: Final = 5.0
"""Seconds between two lines of a log about single requests that failed."""


class StoreChange(NamedTuple):
    """Report that a store was given up on, or found well again; to be told once."""

    store: str
    from_: str
    to: str
    reason: str
    error: str
    """What the last failure was, in a few words."""


class StoreGuard:
    """Keep the circuit of one store, what came of asking it, and what there is to tell of it.

    Ask `admit` before a request to the store and `record` what came of it, once; both are synchronous. `on_error`
    is what policies do while it refuses. `changes` is drained by whichever call comes first, so that each change is
    one event on one call, and counted in `transitions` for metrics.
    """

    def __init__(
        self,
        name: str,
        on_error: OnStoreError = "local",
        *,
        options: CircuitOptions = _CIRCUIT,
        clock: Callable[[], float] = time.monotonic,  # noqa: TID251 - also read in a metric reader's thread
    ) -> None:
        label(name=name)
        one_of(get_args(OnStoreError), on_store_error=on_error)
        self.name = name
        self.on_error: OnStoreError = on_error
        self.changes: list[StoreChange] = []
        self.transitions = 0
        self.unguarded = 0
        """Decisions that were made without the store: by a local share, by letting through, or by refusing."""
        self.lost = 0
        """What was to be told to the store and is not: settlements, refunds, releases."""
        self.ended = False
        """Whether the store has been closed: nothing is asked of it any more."""
        self._circuit = Circuit(options)
        self._clock = clock
        self._error = ""
        self._told = -math.inf
        self._at_end: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Tell whether the store is asked as a matter of course."""
        return self.well and not self.ended

    @property
    def well(self) -> bool:
        """Tell whether the store is not given up on; it may have been closed."""
        return self._circuit.state is CircuitState.CLOSED

    def admit(self) -> Admission:
        """Let one request go to the store.

        Raises `StoreUnavailableError`, at once, while it is not to be asked.
        """
        admission = self._circuit.admit(self._clock())
        if self._circuit.transitions:
            self._note()
        if isinstance(admission, Refusal):
            raise StoreUnavailableError(
                f"{self.name}: not asked for another {admission.retry_after:.3g} s, since it failed ({self._error})",
                retry_after=admission.retry_after,
                name=self.name,
            )
        return admission

    def retry_after(self) -> float:
        """Say how many seconds it takes until the store is asked again; 0 when it is."""
        return self._circuit.retry_after(self._clock())

    def succeeded(self, admission: Admission) -> None:
        """Hear that a request was answered."""
        self._record(admission, Result.SUCCESS)

    def failed(self, admission: Admission, error: str) -> None:
        """Hear that a request was not answered, or with an error that makes the answer useless."""
        self._error = error
        self._record(admission, Result.FAILURE)
        if self.on_error == "closed" and self.well:  # a call is refused for it, and is not told why
            now = self._clock()
            if now - self._told >= _TELL_AGAIN:
                self._told = now
                logger.warning("%s did not answer: %s", self.name, error)

    def dropped(self, admission: Admission) -> None:
        """Hear that nobody waits for the answer any more: it says nothing of the store."""
        self._record(admission, Result.NEUTRAL)

    def ended_error(self) -> StoreUnavailableError:
        """Make the error of a request to a store that has been closed."""
        return self.error("it has been closed")

    def end(self) -> None:
        """Hear that the store has been closed, and wake those who wait for it to give them something."""
        self.ended = True
        waiting, self._at_end = self._at_end, []
        for wake in waiting:
            wake()

    def begin(self) -> None:
        """Hear that the store is used anew, in another event loop."""
        self.ended = False
        self._at_end.clear()

    @contextmanager
    def until_ended(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called when the store is closed, at once if it has been."""
        if self.ended:
            wake()
        self._at_end.append(wake)
        try:
            yield
        finally:
            if wake in self._at_end:
                self._at_end.remove(wake)

    def lose(self) -> None:
        """Count something that was to be told to the store and never will be."""
        self.lost += 1

    def error(self, why: str) -> StoreUnavailableError:
        """Make the error of a request that failed."""
        return StoreUnavailableError(f"{self.name}: {why}", retry_after=self.retry_after(), name=self.name)

    def drain(self) -> list[StoreChange]:
        """Hand over the changes since the last time."""
        changes, self.changes = self.changes, []
        return changes

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauges `store.state` (0 when it is asked, else 1) and, since the start, what it failed to do."""
        telemetry.observe("store.state", self._state, "1", "Whether a store is given up on", merge=max)
        telemetry.observe(
            "store.transitions", self._transitions, "1", "Changes of a store's state", merge=max
        )
        telemetry.observe(
            "store.unguarded", self._unguarded, "1", "Decisions made without the store", merge=max
        )
        telemetry.observe("store.lost", self._lost, "1", "Settlements the store never heard of", merge=max)

    def _record(self, admission: Admission, result: Result) -> None:
        self._circuit.record(admission, self._clock(), result)
        if self._circuit.transitions:
            self._note()

    def _note(self) -> None:
        for transition in self._circuit.drain():
            if transition.to is CircuitState.HALF_OPEN or (
                transition.from_ is CircuitState.HALF_OPEN and transition.to is CircuitState.OPEN
            ):
                continue  # still given up on: a probe that fails is no news
            to = transition.to.value
            self.transitions += 1
            self.changes.append(
                StoreChange(self.name, self._previous(to), to, transition.reason, self._error)
            )
            if to == "open":
                logger.warning("%s is not asked for now: %s", self.name, self._error)
            else:
                logger.warning("%s is asked again", self.name)

    def _previous(self, to: str) -> str:
        return "open" if to == "closed" else "closed"

    def _gauge(self, value: float) -> Iterable[tuple[float, Mapping[str, str]]]:
        yield value, {STORE_NAME: self.name}

    def _state(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        return self._gauge(0.0 if self.well else 1.0)

    def _transitions(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        return self._gauge(self.transitions)

    def _unguarded(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        return self._gauge(self.unguarded)

    def _lost(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        return self._gauge(self.lost)
