"""A new model in place of an old one, for a growing share of calls, and back by itself when it does worse."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from resilient_llm._loop import LoopBound
from resilient_llm._options import at_least, flag, function, instance_of, label, seconds
from resilient_llm.core.canary import Drawn, Rollout, RolloutOptions, RolloutState, place_of
from resilient_llm.core.sample import Result, Sample
from resilient_llm.core.slo import SLO
from resilient_llm.errors import ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.outcome import Outcome, Scope, Verdict
from resilient_llm.policies._keyed import OVERFLOW, Key, key_function
from resilient_llm.policies._known_models import refuse_unknown
from resilient_llm.routing.canary_change import CanaryChange
from resilient_llm.telemetry.names import CANARY, CANARY_MODEL, CANARY_NAME, CANARY_SHARE

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.telemetry import Telemetry

__all__ = ["Canary", "CanaryChange", "CanaryStatus"]

logger = logging.getLogger("resilient_llm")

_MAX_UNTOLD = 16
_UNAVAILABLE = frozenset({"circuit_open", "concurrency_limit", "model_not_found", "no_target"})
"""Refusals on this side that are the model's doing: it could not be asked at all."""


class CanaryStatus(NamedTuple):
    """Say how a canary stands.

    `step` counts from 0, and is `None` where nothing goes on by itself. `waits_for` is what keeps it there:
    `step_duration`, `min_calls`, `baseline` (it has too few calls) or a bound of the SLO. `restarts_in` is in
    seconds, infinite where it does not.
    """

    state: RolloutState
    share: float
    step: int | None
    waits_for: str | None
    restarts_in: float
    seen: Sample
    seen_of_baseline: Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Canary:
    """Send a share of the calls for `model` to `candidate`, and more of them step by step.

    A step is passed when it has lasted `step_duration` seconds, `min_calls` calls of the candidate's have ended, and
    what was seen of them is within the `slo`. When that is clearly violated, all calls go to `model` again at once;
    after `cool_off` seconds it begins anew, or with `restart=False` when `resume` is called. Once the last step is
    passed the candidate is promoted, and watched no longer; a last step below 1 is held for you to decide.

    Calls of one `key` stay together: whoever is in at a small share is in at every larger one, in every process with
    the same `salt`. Calls without a key (`None`) are drawn by `random`. Those of the candidate have the `purpose` for
    credentials, unless they have one.

    A call counts when its reply has been read to its end: failures, throttling, a passed deadline, an answer by a
    fallback model and a candidate that cannot be asked at all are errors. Cancelled calls, and those that this side
    refuses for other reasons, count for nothing.

    Each change is logged, an event on the span of the call that brought it about (or of the next one), and given to
    `on_change`, which must not block. Counted in this process only. Needs a `Router` further in.
    """

    model: str
    candidate: str
    steps: Sequence[float] = (0.05, 0.25, 0.5, 1.0)
    key: Key = "tenant"
    slo: SLO = field(default_factory=SLO)
    min_calls: int = 50
    step_duration: float = 600.0
    cool_off: float = 3600.0
    restart: bool = True
    salt: str | None = None
    purpose: str | None = "canary"
    on_change: Callable[[CanaryChange], object] | None = None
    random: Random = field(default_factory=Random, repr=False)
    name: str = "canary"
    placement: ClassVar[Placement] = Placement.CANARY
    _options: RolloutOptions = field(init=False, repr=False)
    _key: Callable[[Call], Hashable] = field(init=False, repr=False)
    _salt: str = field(init=False, repr=False)
    _rollouts: list[Rollout] = field(init=False, repr=False, default_factory=list)
    _untold: deque[CanaryChange] = field(
        init=False, repr=False, default_factory=lambda: deque(maxlen=_MAX_UNTOLD)
    )
    _loop: LoopBound = field(init=False, repr=False)

    def __post_init__(self) -> None:
        label(model=self.model, candidate=self.candidate, name=self.name)
        flag(restart=self.restart)
        if self.model == self.candidate:
            raise ConfigurationError(f"candidate={self.candidate!r}: allowed are other models than model=")
        for option in ("salt", "purpose"):
            if getattr(self, option) is not None:
                label(**{option: getattr(self, option)})
        function(none=True, on_change=self.on_change)
        at_least(1, min_calls=self.min_calls)
        seconds(step_duration=self.step_duration, cool_off=self.cool_off)
        instance_of(Random, random=self.random)
        try:
            options = RolloutOptions(
                steps=self.steps,
                slo=self.slo,
                min_calls=self.min_calls,
                step_duration=self.step_duration,
                cool_off=self.cool_off,
                restart=self.restart,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        salt = f"{self.model}>{self.candidate}" if self.salt is None else self.salt
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_key", key_function(self.key))
        object.__setattr__(self, "_salt", salt)
        object.__setattr__(self, "_loop", LoopBound(self.name, self._begin_anew))
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._rollouts[:] = [Rollout(self._options)]

    @property
    def _rollout(self) -> Rollout:
        return self._rollouts[0]

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` when nothing further in takes a call to another model, or does not know it."""
        after = policies[policies.index(self) + 1 :]
        refuse_unknown(after, model=[self.model], candidate=[self.candidate])
        if not any(getattr(policy, "placement", Placement.ROUTER) is Placement.ROUTER for policy in after):
            raise ConfigurationError(
                f"{self.name} chooses between models, and no Router goes by it: all calls would go to {self.model!r}"
            )

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Choose the model for a call, and await the rest of the pipeline."""
        if (call.logical_model or call.profile.model) != self.model:
            return await call_next(call)
        self._loop.bind(call.loop)
        now, rollout = call.loop.time(), self._rollout
        drawn = rollout.draw(self._place(call), now)
        if rollout.changes or self._untold:
            self._report(call)
        if drawn.candidate:
            call.logical_model = self.candidate
            call.purpose = call.purpose or self.purpose
            call.telemetry.event(
                call,
                CANARY,
                {CANARY_NAME: self.name, CANARY_MODEL: self.candidate, CANARY_SHARE: rollout.share},
            )
        call.on_finish(partial(self._record, call, rollout, drawn, now))
        return await call_next(call)

    def _place(self, call: Call) -> float:
        key = self._key(call)
        return self.random.random() if key is None or key is OVERFLOW else place_of(key, self._salt)

    def _record(self, call: Call, rollout: Rollout, drawn: Drawn, since: float, outcome: Outcome) -> None:
        result = _result(call, outcome)
        if result is None:
            return
        now = call.loop.time()
        cost = call.cost if call.route is not None and call.cost > 0 else None
        first_token = _first_token(call, outcome, since, now)
        rollout.record(drawn, now, result, first_token=first_token, cost=cost)
        if rollout.changes:
            self._report(call)

    def _report(self, call: Call | None) -> None:
        """Tell of what has changed: at once in the log and to the application, on a span when there is a call."""
        for change in self._rollout.drain():
            told = CanaryChange(self.name, self.model, self.candidate, *change)
            self._untold.append(told)
            backwards = told.to_state is RolloutState.ROLLED_BACK
            level = logging.WARNING if backwards else logging.INFO
            logger.log(level, "%s", told, extra={"canary": told._asdict()})
            if self.on_change is not None:
                try:
                    self.on_change(told)
                except Exception:
                    logger.exception("on_change=%r of %s failed", self.on_change, self.name)
        if call is None:
            return
        while self._untold:
            call.telemetry.event(call, "canary.change", self._untold.popleft().attributes())

    # By hand

    def set_share(self, share: float) -> None:
        """Send this share of calls to the candidate until told otherwise; it is still rolled back by itself.

        From any thread; in another it takes effect as soon as the event loop comes to it. Raises
        `ConfigurationError` for a share that is not from 0 to 1, and `EventLoopError` where no event loop runs,
        neither here nor the one this canary belongs to.
        """
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ConfigurationError(f"share={share!r}: allowed are numbers from 0 to 1")
        self._by_hand(lambda rollout, now: rollout.set_share(share, now))

    def promote(self) -> None:
        """Send all calls to the candidate, and watch it no longer; from any thread, as `set_share`."""
        self._by_hand(Rollout.promote)

    def roll_back(self) -> None:
        """Send no more calls to the candidate, for `cool_off` or until `resume`; from any thread, as `set_share`."""
        self._by_hand(Rollout.roll_back)

    def resume(self) -> None:
        """Go on by itself: from the share that was set, else from the first step; from any thread, as `set_share`."""
        self._by_hand(Rollout.resume)

    def _by_hand(self, change: Callable[[Rollout, float], None]) -> None:
        def do(now: float) -> None:
            change(self._rollout, now)
            self._report(None)

        self._loop.bind_alive()
        self._loop.run(do)

    # How it stands

    def status(self) -> CanaryStatus:
        """Say how it stands: state, share, step, and what was seen since the last change. For its own thread."""
        rollout = self._rollout
        loop = self._loop.loop
        now = 0.0 if loop is None else loop.time()
        return CanaryStatus(
            rollout.state,
            rollout.share,
            rollout.step,
            rollout.waits_for(now),
            rollout.restarts_in(now),
            rollout.candidate,
            rollout.baseline,
        )

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauge `canary.share`."""
        telemetry.observe(
            "canary.share", self._observe, "1", "Share of calls that go to the candidate", merge=max
        )

    def _observe(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        yield self._rollout.share, {CANARY_NAME: self.name, CANARY_MODEL: self.candidate}


def _result(call: Call, outcome: Outcome) -> Result | None:
    """Say what the end of a call tells of its model; `None` when nothing."""
    if outcome.ok:
        return Result.ERROR if call.fallbacks else Result.SUCCESS
    if outcome.verdict is Verdict.NEUTRAL:
        late = outcome.error_type == "deadline_exceeded" and call.sent is not False
        return Result.ERROR if late or outcome.error_type in _UNAVAILABLE else None
    if outcome.scope is Scope.LOCAL:
        return None
    if outcome.scope is Scope.REQUEST or outcome.context_exceeded:
        return Result.CLIENT_ERROR
    return Result.ERROR


def _first_token(call: Call, outcome: Outcome, since: float, now: float) -> float | None:
    """Give the seconds from when the call came by to its first token; `None` where there is nothing to tell."""
    if call.first_content is not None:
        return call.started + call.first_content - since
    if outcome.ok:
        return now - since  # no stream: all of it comes at once
    return math.inf if outcome.silent or outcome.error_type == "deadline_exceeded" else None
