"""When a circuit opens, for how long, and what closes it.

Only the settings and what makes them impossible; `core/circuit.py` acts on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CircuitOptions"]

_RATIOS = ("failure_ratio", "slow_call_ratio")
_COUNTS = (
    "minimum_throughput",
    "sampling_calls",
    "consecutive_failures",
    "half_open_max_calls",
    "success_threshold",
)
_DURATIONS = (
    "sampling_duration",
    "slow_call_duration",
    "break_duration",
    "max_break_duration",
    "max_retry_after",
    "probe_timeout",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitOptions:
    """Say when a circuit opens, for how long, and what closes it.

    It opens on any of three triggers, each `None` when off: `failure_ratio` of the recent calls failed, once
    there were `minimum_throughput` of them; `consecutive_failures` came without a success in between;
    `slow_call_ratio` of the recent calls took `slow_call_duration` or longer to their first token (the same
    minimum applies). Recent means the last `sampling_duration` seconds, 60 unless told otherwise, or
    instead the last `sampling_calls` calls.

    A break lasts `break_duration`, and `break_multiplier` times longer after each failed probe, up to
    `max_break_duration`; up to `break_jitter_ratio` of that is added at random. A failure's Retry-After
    extends it, up to `max_retry_after`. Then at most `half_open_max_calls` probes run at a time, each for
    at most `probe_timeout`, until `success_threshold` of them have succeeded.

    Raises `ValueError` naming the option, its value and what is allowed.
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
    max_retry_after: float = 3600.0
    """Far above any hint that is meant; it keeps a garbled one from closing a target for good."""
    half_open_max_calls: int = 1
    success_threshold: int = 1
    probe_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.sampling_duration is None and self.sampling_calls is None:
            object.__setattr__(self, "sampling_duration", 60.0)
        for name in _RATIOS:
            ratio = getattr(self, name)
            self._require(name, "above 0 and at most 1", allowed=ratio is None or 0 < ratio <= 1)
        for name in _COUNTS:
            count = getattr(self, name)
            self._require(name, "at least 1", allowed=count is None or count >= 1)
        for name in _DURATIONS:
            seconds = getattr(self, name)
            self._require(name, "finite seconds above 0", allowed=seconds is None or 0 < seconds < math.inf)
        self._require(
            "break_multiplier", "finite and at least 1", allowed=1 <= self.break_multiplier < math.inf
        )
        self._require("break_jitter_ratio", "between 0 and 1", allowed=0 <= self.break_jitter_ratio <= 1)
        self._require(
            "max_break_duration",
            f"at least break_duration={self.break_duration!r}",
            allowed=self.max_break_duration >= self.break_duration,
        )
        self._require(
            "sampling_calls",
            f"left out when sampling_duration={self.sampling_duration!r} is given: there is one window",
            allowed=self.sampling_calls is None or self.sampling_duration is None,
        )
        self._require(
            "minimum_throughput",
            f"at most sampling_calls={self.sampling_calls!r}, or no ratio would ever count",
            allowed=self.sampling_calls is None or self.minimum_throughput <= self.sampling_calls,
        )
        self._require(
            "slow_call_duration",
            f"given when, and only when, slow_call_ratio is (it is {self.slow_call_ratio!r})",
            allowed=(self.slow_call_duration is None) is (self.slow_call_ratio is None),
        )
        triggers = (self.failure_ratio, self.consecutive_failures, self.slow_call_ratio)
        self._require(
            "consecutive_failures",
            "given when both ratios are off, or nothing would open the circuit",
            allowed=triggers != (None, None, None),
        )

    def _require(self, name: str, what: str, *, allowed: bool) -> None:
        if not allowed:
            raise ValueError(f"{name}={getattr(self, name)!r}: must be {what}")
