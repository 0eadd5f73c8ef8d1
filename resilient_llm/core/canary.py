"""How far a candidate has come: which share of calls is its, and when that changes.

A state machine over what calls came to. What a model is, and how a call gets to it, must not enter here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from resilient_llm.core.sample import Result, Sample
from resilient_llm.core.slo import SLO, Judgement, judge

__all__ = ["Drawn", "Rollout", "RolloutChange", "RolloutOptions", "RolloutState", "place_of"]

_SLICES = 10


class RolloutState(Enum):
    """Say how a rollout stands."""

    RUNNING = "running"
    """It goes from step to step by itself."""
    HELD = "held"
    """Its share was set by hand, or its last step is passed but not all calls: it is watched, and stays."""
    PROMOTED = "promoted"
    """The candidate has all calls, and is watched no longer."""
    ROLLED_BACK = "rolled_back"
    """The candidate has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Say how a rollout goes on: the shares it steps through, and what it takes to step.

    A step is passed after `step_duration` seconds and `min_calls` of the candidate's calls, with the `slo` kept. A
    rollout that was rolled back begins again after `cool_off` seconds where `restart` says so. Raises `ValueError`
    for an option out of range.
    """

    steps: Sequence[float] = (0.05, 0.25, 0.5, 1.0)
    slo: SLO = field(default_factory=SLO)
    min_calls: int = 50
    step_duration: float = 600.0
    cool_off: float = 3600.0
    restart: bool = True

    def __post_init__(self) -> None:
        steps = tuple(self.steps) if isinstance(self.steps, Sequence) else ()
        rising = all(
            isinstance(step, int | float) and not isinstance(step, bool) and before < step <= 1
            for before, step in zip((0.0, *steps), steps, strict=False)
        )
        if not steps or not rising:
            raise ValueError(f"steps={self.steps!r}: allowed are rising shares above 0, up to 1")
        object.__setattr__(self, "steps", steps)
        if not isinstance(self.slo, SLO):
            raise ValueError(f"slo={self.slo!r}: allowed is an SLO")  # noqa: TRY004 - as all other options
        if not isinstance(self.min_calls, int) or isinstance(self.min_calls, bool) or self.min_calls < 1:
            raise ValueError(f"min_calls={self.min_calls!r}: allowed are whole numbers from 1")
        for name in ("step_duration", "cool_off"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: allowed are seconds above 0, finite")


class RolloutChange(NamedTuple):
    """Say how a rollout has changed, why, and what of its calls and the others had been seen by then.

    `reason` is `passed` (a step), the name of the bound of the SLO that was violated, `cool_off`, or one of
    `set_by_hand`, `promoted_by_hand`, `rolled_back_by_hand` and `resumed_by_hand`.
    """

    from_state: RolloutState
    to_state: RolloutState
    from_share: float
    to_share: float
    reason: str
    candidate: Sample
    baseline: Sample


class Drawn(NamedTuple):
    """Say whether a call is the candidate's, and in which run that was decided."""

    candidate: bool
    run: int


class Rollout:
    """Draw calls for a candidate, step by step, as long as it keeps its SLO.

    Every call has a place from 0 to 1 (`place_of`), and is the candidate's when that is below the share: who is in
    at a small share is in at every larger one. What was seen counts for `step_duration` seconds, and longer while it
    takes that to have `min_calls` of the candidate's; in every step anew. A baseline with too few calls, as when all
    are the candidate's, is that of the step before. Results of calls that were drawn before the rollout was last
    rolled back, begun or set are dropped. Times are seconds of one monotonic clock.
    """

    __slots__ = (
        "_before",
        "_changes",
        "_options",
        "_since",
        "_step",
        "_window",
        "run",
        "share",
        "state",
    )

    def __init__(self, options: RolloutOptions) -> None:
        self._options = options
        self._changes: list[RolloutChange] = []
        self._before: Sample | None = None
        self._window = _Window(options)
        self._since: float | None = None
        self._step = 0
        self.run = 0
        self.state = RolloutState.RUNNING
        self.share: float = options.steps[0]

    @property
    def candidate(self) -> Sample:
        """Give what was seen of the candidate."""
        return self._window.candidate

    @property
    def baseline(self) -> Sample:
        """Give what was seen of the others in the same time."""
        return self._window.baseline

    @property
    def step(self) -> int | None:
        """Give the number of the step that it is at, from 0; `None` where it goes nowhere by itself."""
        return self._step if self.state is RolloutState.RUNNING else None

    @property
    def changes(self) -> int:
        """Count the changes that nobody has been told of."""
        return len(self._changes)

    def drain(self) -> list[RolloutChange]:
        """Give the changes since the last time, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def draw(self, place: float, now: float) -> Drawn:
        """Say whose the call is that has this place."""
        if self._since is None:
            self._since = now
        if self.state is RolloutState.ROLLED_BACK and self.restarts_in(now) <= 0:
            self._begin(now, RolloutState.RUNNING, self._options.steps[0], "cool_off", step=0)
        return Drawn(place < self.share, self.run)

    def record(
        self,
        drawn: Drawn,
        now: float,
        result: Result,
        *,
        first_token: float | None = None,
        cost: float | None = None,
    ) -> None:
        """Count a call that is over, and step or roll back by it."""
        if drawn.run != self.run or self.state in (RolloutState.PROMOTED, RolloutState.ROLLED_BACK):
            return
        self._window.sample(now, candidate=drawn.candidate).record(result, first_token=first_token, cost=cost)
        self._window.total(candidate=drawn.candidate).record(result, first_token=first_token, cost=cost)
        if drawn.candidate:
            self._review(now)

    def waits_for(self, now: float) -> str | None:
        """Say what keeps a running rollout at its step: `step_duration`, `min_calls`, `baseline` or a bound."""
        if self.state is not RolloutState.RUNNING:
            return None
        if self._since is None or now - self._since < self._options.step_duration:
            return "step_duration"
        return self._judge()[1]

    def restarts_in(self, now: float) -> float:
        """Give the seconds until it begins again by itself; infinite where it does not."""
        if self.state is not RolloutState.ROLLED_BACK or not self._options.restart or self._since is None:
            return math.inf
        return max(0.0, self._since + self._options.cool_off - now)

    def set_share(self, share: float, now: float) -> None:
        """Set the share by hand, and stay there."""
        self._begin(now, RolloutState.HELD, share, "set_by_hand")

    def promote(self, now: float) -> None:
        """Give the candidate all calls, for good."""
        self._begin(now, RolloutState.PROMOTED, 1.0, "promoted_by_hand")

    def roll_back(self, now: float) -> None:
        """Give the candidate no more calls, for `cool_off` or until told otherwise."""
        self._begin(now, RolloutState.ROLLED_BACK, 0.0, "rolled_back_by_hand")

    def resume(self, now: float) -> None:
        """Go on by itself: where it was held from the highest step not above its share, else from the first."""
        if self.state is RolloutState.RUNNING:
            return
        steps = self._options.steps
        share = self.share if self.state is RolloutState.HELD else 0.0
        step = max(0, sum(step <= share for step in steps) - 1)
        self._begin(now, RolloutState.RUNNING, steps[step], "resumed_by_hand", step=step)

    def _judge(self) -> tuple[Judgement, str | None]:
        min_calls, baseline = self._options.min_calls, self._window.baseline
        usual: Sample | None = baseline
        if baseline.calls < min_calls and (self.share >= 1 or self._before is not None):
            usual = self._before
        return judge(self._options.slo, self._window.candidate, usual, min_calls=min_calls)

    def _review(self, now: float) -> None:
        judgement, bound = self._judge()
        if judgement is Judgement.VIOLATED:
            self._begin(now, RolloutState.ROLLED_BACK, 0.0, bound or "slo")
        elif (
            judgement is Judgement.KEPT and self.waits_for(now) is None and self.state is RolloutState.RUNNING
        ):
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self._window.baseline.calls >= self._options.min_calls:
            self._before = self._window.baseline
        steps, step = self._options.steps, self._step + 1
        if step < len(steps):
            self._change(now, RolloutState.RUNNING, steps[step], "passed")
            self._step = step
        else:
            done = RolloutState.PROMOTED if self.share >= 1 else RolloutState.HELD
            self._change(now, done, self.share, "passed")

    def _begin(self, now: float, state: RolloutState, share: float, reason: str, *, step: int = 0) -> None:
        self._change(now, state, share, reason)
        self._step = step
        self._before = None
        self.run += 1

    def _change(self, now: float, state: RolloutState, share: float, reason: str) -> None:
        seen = self._window
        self._changes.append(
            RolloutChange(self.state, state, self.share, share, reason, seen.candidate, seen.baseline)
        )
        self.state, self.share, self._since = state, share, now
        self._window = _Window(self._options)


class _Slice(NamedTuple):
    number: float
    candidate: Sample
    baseline: Sample


class _Window:
    """What was seen of late, in slices of a tenth of `step_duration`."""

    __slots__ = ("_min_calls", "_slices", "_width", "baseline", "candidate")

    def __init__(self, options: RolloutOptions) -> None:
        self._width = options.step_duration / _SLICES
        self._min_calls = options.min_calls
        self._slices: deque[_Slice] = deque()
        self.candidate = Sample()
        self.baseline = Sample()

    def total(self, *, candidate: bool) -> Sample:
        return self.candidate if candidate else self.baseline

    def sample(self, now: float, *, candidate: bool) -> Sample:
        """Give the sample of the slice of time that it is, for the candidate or the baseline."""
        number = now // self._width
        slices = self._slices
        if not slices or slices[-1].number < number:
            self._make_room(number)
            slices.append(_Slice(number, Sample(), Sample()))
        latest = slices[-1]
        return latest.candidate if candidate else latest.baseline

    def _make_room(self, number: float) -> None:
        """Forget slices that are too old, but never so much that too few of the candidate's calls are left."""
        slices, calls = self._slices, self.candidate.calls
        forgotten = False
        while slices and slices[0].number <= number - _SLICES:
            calls -= slices[0].candidate.calls
            if calls < self._min_calls:
                break
            slices.popleft()
            forgotten = True
        if len(slices) > 2 * _SLICES:  # few calls in a long time: so many slices tell enough
            oldest, next_ = slices.popleft(), slices[0]
            next_.candidate.add(oldest.candidate)
            next_.baseline.add(oldest.baseline)
        if forgotten:
            self.candidate, self.baseline = Sample(), Sample()
            for slice_ in slices:
                self.candidate.add(slice_.candidate)
                self.baseline.add(slice_.baseline)


def place_of(key: Hashable, salt: str) -> float:
    """Give a key's place from 0 to 1 (1 excluded), the same in every process as long as it is written the same.

    With another `salt` places are others.
    """
    text = key if isinstance(key, str) else repr(key)
    said = f"{len(salt)}:{salt}{text}".encode("utf-8", "surrogatepass")
    # A float holds 53 bits: with more, the highest would be rounded up to 1.
    return (int.from_bytes(blake2b(said, digest_size=8).digest()) >> 11) / 2**53
