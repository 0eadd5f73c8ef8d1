"""Where one call has been tried, and where it may still go.

A call goes through the targets of its model, each at most once a round, and then to the next model of its chain.
Which of the targets that are left is best the balancer says, and what is known of each its deployment. When an
attempt is made is `Retry`'s to decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from resilient_llm._loop import ROUNDING
from resilient_llm.alternatives import Again
from resilient_llm.errors import NoTargetError
from resilient_llm.outcome import Verdict
from resilient_llm.routing.refusal import Passed

if TYPE_CHECKING:
    from random import Random

    from resilient_llm.call import Call
    from resilient_llm.core.credential_pool import CredentialPool
    from resilient_llm.core.target_load import Pool, TargetLoad
    from resilient_llm.errors import RejectedError
    from resilient_llm.outcome import Outcome
    from resilient_llm.routing.balancers import Balancer
    from resilient_llm.routing.deployment import Deployment
    from resilient_llm.routing.needs import Needs

__all__ = ["Group", "Queueing", "Route", "Tell"]


class Group(NamedTuple):
    """Hold the equivalent targets that answer for one logical model."""

    model: str
    pool: Pool
    deployments: dict[TargetLoad, Deployment]
    out: dict[Deployment, None]
    """Those of all groups that could not be asked of late, and have not answered since."""


class Queueing(NamedTuple):
    """Say what a call without a target could wait for: a time, and credentials that are in use."""

    wait: float
    spread: float
    pools: Sequence[CredentialPool]


Tell: TypeAlias = "Callable[[Call, Route, Sequence[str]], None]"
"""Hear that a call goes on to another model, and why the targets of the one it was at were passed over."""


class Route:
    """Remember where one call was tried. Satisfies `call.Route`.

    `patience`, in seconds, is how long the call waits for its model rather than go on to the next of `chain`; `tell`
    hears when it does.
    """

    __slots__ = (
        "_balancer",
        "_chain",
        "_given_up",
        "_patience",
        "_random",
        "_refused",
        "_spared",
        "_stage",
        "_tell",
        "_tried",
        "answered",
        "last",
        "needs",
        "tries",
    )

    def __init__(  # noqa: PLR0917 - made for every call, where naming them costs
        self,
        chain: Sequence[Group],
        needs: Needs,
        balancer: Balancer,
        patience: float,
        random: Random,
        tell: Tell,
    ) -> None:
        self._chain = chain
        self.needs = needs
        self._balancer = balancer
        self._patience = patience
        self._random = random
        self._tell = tell
        self._stage = 0
        self._tried: list[Deployment] = []  # in this round
        self._given_up: tuple[Deployment, ...] = ()  # not for this call
        self._refused: dict[Deployment, RejectedError] = {}  # on this side, since it last waited
        self._spared: tuple[Deployment, ...] = ()
        """Once for each attempt that failed for its credential and is not counted."""
        self.tries = 0
        """Attempts made of the model it is at, but for hedges, and for those that found a credential dead."""
        self.last: Deployment | None = None
        """Where it went last."""
        self.answered: Deployment | None = None
        """Which of them has answered."""

    @property
    def chain(self) -> Sequence[Group]:
        """Give its model and those it falls back to."""
        return self._chain

    @property
    def group(self) -> Group:
        """Give the model it is at."""
        return self._chain[self._stage]

    def choose(self, call: Call, now: float) -> tuple[Deployment | None, Sequence[str]]:
        """Give the best target that may be asked now, if the model it is at has one.

        Then those that the balancer would have preferred, as `target:why`.
        """
        group = self._chain[self._stage]
        rejected: list[str] = []
        fresh = not (self._tried or self._given_up or self._refused)
        if group.out and fresh and self._balancer.spreads:
            # Left to chance, the call that finds out that a target is back might be long in coming.
            for deployment in group.out:
                if deployment.load in group.deployments and deployment.wants_probe(call, self.needs, now):
                    return deployment, rejected
        loads: Iterable[TargetLoad] = group.pool.loads
        if len(group.pool.loads) > 1:
            loads = self._balancer.order(group.pool, self.needs, now, self._random)
        for load in loads:
            deployment = group.deployments[load]
            why = None if fresh else self._why_not(deployment)
            if why is None:
                why = deployment.why_not(call, self.needs, now)
                if why is None:
                    return deployment, rejected
            rejected.append(f"{load.name}:{why}")
        return None, rejected

    def _why_not(self, deployment: Deployment) -> str | None:
        if deployment in self._given_up:
            return "given_up"
        if deployment in self._refused:
            return "refused"
        return "tried" if deployment in self._tried else None

    @property
    def fell_back(self) -> bool:
        """Tell whether it has gone on to another model than its own."""
        return self._stage > 0

    def send(self, call: Call, deployment: Deployment, now: float) -> None:
        """Make an attempt one of the target that was chosen."""
        self._tried.append(deployment)
        if call.reason != "hedge":
            if self._stage and not self.tries:
                call.reason = "fallback"
            self.tries += 1
        self.last = deployment
        deployment.take(call, now, self._failed)

    def refused(self, call: Call, deployment: Deployment, error: RejectedError) -> None:
        """Note that an attempt has been refused on this side and taken back: it has not been made."""
        self._tried.remove(deployment)
        self._refused[deployment] = error
        if call.reason != "hedge":
            self.tries -= 1

    def begin_round(self) -> None:
        """Let every target have another turn: the call has waited."""
        self._tried.clear()
        self._refused.clear()

    def _failed(self, call: Call, deployment: Deployment, outcome: Outcome) -> None:
        """Learn from an attempt that ended without success."""
        if outcome.context_exceeded:
            self.needs.outgrew(deployment.target.context_window)
        elif outcome.silent and self._has_another(deployment):
            self._given_up += (deployment,)
        elif outcome.dead_credential:
            # Another of its credentials may do; the one that failed is set aside already.
            if deployment.credentials is None:
                self._given_up += (deployment,)
                return
            self._untry(deployment)
            if call.reason != "hedge" and self._spared.count(deployment) < len(deployment.credentials):
                self._spared += (deployment,)
                self.tries -= 1
        elif outcome.verdict is Verdict.THROTTLED and deployment.other_credential(call):
            self._untry(deployment)

    def _has_another(self, deployment: Deployment) -> bool:
        """Tell whether another target, of any model of the chain, could carry out the call as it is written."""
        return any(
            other is not deployment and not other.isolated and other.never(self.needs) is None
            for group in self._chain
            for other in group.deployments.values()
        )

    def _untry(self, deployment: Deployment) -> None:
        if deployment in self._tried:
            self._tried.remove(deployment)

    def elsewhere(self, call: Call) -> bool:
        """Tell whether a target that answers for the same model is untried in this round, and usable now."""
        now = call.loop.time()
        return any(
            self._why_not(deployment) is None and deployment.why_not(call, self.needs, now) is None
            for deployment in self.group.deployments.values()
        )

    def again_in(self, call: Call, delay: float) -> Again:
        """Give the seconds, at least `delay`, until a target of the same model may be tried again.

        Infinity when none may: trying again is useless, its circuit stays open, or its credentials are set aside,
        for longer than the call is patient, or there is another model and all of this one's take longer than that.
        """
        now = call.loop.time()
        again = Again(math.inf)
        for deployment in self.group.deployments.values():
            if deployment not in self._given_up and deployment not in self._refused:
                wait = deployment.usable_in(call, self.needs, now, delay=delay, patience=self._patience)
                again = min(again, Again(wait, deployment.cooling.spread(now)))
        if again.wait > self._patience + ROUNDING and self.has_next(call):
            return Again(math.inf)
        return again

    def queueing(self, call: Call) -> Queueing:
        """Say what a call could wait for that has found no target of the model it is at.

        Neither open circuits nor credentials that were refused: a call that has not failed yet is refused at once.
        """
        now = call.loop.time()
        wait = Again(math.inf)
        pools: list[CredentialPool] = []
        for deployment in self.group.deployments.values():
            if self._why_not(deployment) is not None:
                continue
            seconds = deployment.usable_in(call, self.needs, now)
            if 0 < seconds < math.inf:
                wait = min(wait, Again(seconds, deployment.cooling.spread(now)))
            elif not seconds and deployment.credentials is not None:  # others use all that it may have
                pools.append(deployment.credentials)
                seconds = deployment.credentials.free_in(now, call.purpose)
                if seconds > 0:  # else it is another call's turn
                    wait = min(wait, Again(seconds))
        return Queueing(wait.wait, wait.spread, pools)

    def has_next(self, call: Call) -> bool:
        """Tell whether there is another model that may be tried."""
        return self._next(call) is not None

    def next_model(self, call: Call) -> bool:
        """Go on to the next model of the chain; `False`, and nothing, when there is none that may be tried."""
        stage = self._next(call)
        if stage is None:
            return False
        if call.telemetry.recording:
            self._tell(call, self, [str(passed) for passed in self._passed(call, self.group)])
        self._stage = stage
        self.tries = 0
        (call.parent or call).fallbacks += 1
        self._tried.clear()
        return True

    def _next(self, call: Call) -> int | None:
        now = call.loop.time()
        for stage in range(self._stage + 1, len(self._chain)):
            for deployment in self._chain[stage].deployments.values():
                if deployment.usable_in(call, self.needs, now) <= self._patience:
                    return stage
        return None

    def passed(self, call: Call) -> list[Passed]:
        """Give why each target of every model in its chain is none for the call now."""
        return [one for group in self._chain for one in self._passed(call, group)]

    def _passed(self, call: Call, group: Group) -> Iterator[Passed]:
        now = call.loop.time()
        for deployment in group.deployments.values():
            error = self._refused.get(deployment)
            if isinstance(error, NoTargetError) and error.rejected:
                yield Passed(deployment, error.rejected[0].rpartition(":")[2], math.inf, error)
                continue
            why = deployment.why_not(call, self.needs, now) or self._why_not(deployment) or "refused"
            gone = deployment in self._given_up
            back_in = math.inf if gone else deployment.back_in(call, self.needs, now)
            yield Passed(deployment, why, back_in, error)
