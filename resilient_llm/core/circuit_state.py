"""A circuit's state as values: what is reported of it, and what processes share through a store.

Nothing here decides anything; `core/circuit.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

__all__ = ["CircuitSnapshot", "CircuitState", "Reason", "Transition"]


class CircuitState(StrEnum):
    """Say what a circuit lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing until the break has elapsed; the first call admitted after it makes the circuit half-open."""
    HALF_OPEN = "half_open"
    """A bounded number of probes."""
    ISOLATED = "isolated"
    """Nothing until it is closed by hand."""


Reason: TypeAlias = Literal[
    "initial",
    "failure_ratio",
    "consecutive_failures",
    "slow_call_ratio",
    "break_elapsed",
    "probe_failed",
    "probe_timeout",
    "probe_succeeded",
    "isolated",
    "closed_manually",
]
"""Why a circuit is in its state."""


@dataclass(frozen=True, slots=True)
class Transition:
    """Report a change of state that has happened at the time `at`, the earliest moment it was due."""

    from_: CircuitState
    to: CircuitState
    reason: Reason
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitSnapshot:
    """What the processes that share a circuit must agree on.

    Clocks differ between processes, so times are in seconds left. `generation` rises with every change:
    a store takes a snapshot only in place of the generation it was made from (compare-and-set).
    """

    generation: int
    state: CircuitState
    reason: Reason
    wait: float
    """Seconds before which no probe may start."""
    next_break: float
    """Length of the next break, without jitter."""
    successes: int
    probes: Mapping[int, float]
    """For each outstanding probe, by the generation it was admitted in, what is left of its lease."""
