"""Which target each attempt goes to.

A thin shell: what a call has tried its `Route` remembers, what is known of a target its `Deployment`, and a balancer
says which is best. Here attempts are sent, taken back when a target refuses them, and waited for where all cool down.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._loop import ROUNDING, LoopBound
from resilient_llm._options import flag, function, instance_of, label, number, offers, seconds
from resilient_llm.errors import ConfigurationError, RejectedError, UnknownModelError
from resilient_llm.message import header, without
from resilient_llm.ordering import Placement, check_order, policy_name
from resilient_llm.policies.circuit_breaker import CircuitBreaker
from resilient_llm.policies.tokens import TokenEstimate
from resilient_llm.routing.balancers import Balancer, WeightedLeastConnections
from resilient_llm.routing.decision import decision
from resilient_llm.routing.deployment import ANSWERED_BY
from resilient_llm.routing.fleet import Fleet
from resilient_llm.routing.health import Health, circuits_of, report
from resilient_llm.routing.models import Models, Targets
from resilient_llm.routing.needs import Needs
from resilient_llm.routing.refusal import refusal
from resilient_llm.routing.route import Route
from resilient_llm.routing.stored_answers import StoredAnswers
from resilient_llm.routing.target_change import TargetChange
from resilient_llm.telemetry.names import TARGET_CHANGE

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext, Policy
    from resilient_llm.core.credential_pool import CredentialPool
    from resilient_llm.message import Reply
    from resilient_llm.policies.tokens import Estimate
    from resilient_llm.pricing import Price
    from resilient_llm.routing.deployment import Deployment
    from resilient_llm.routing.route import Group
    from resilient_llm.routing.target_change import ByHand
    from resilient_llm.target import Target
    from resilient_llm.telemetry import Telemetry
    from resilient_llm.telemetry.silent import WaitOutcome

__all__ = ["ANSWERED_BY", "Router", "Targets"]

logger = logging.getLogger("resilient_llm")


_MAX_WEIGHT = 1e12
_MAX_UNTOLD = 16


@dataclass(frozen=True, eq=False)
class Router:
    """Send each attempt to the target that is best for it.

    `targets` are lists of equivalent targets by the model that callers ask for, or one list for whatever they ask;
    `fallbacks` are the models that a model's calls go on to, in order, and `default` is the model of calls that ask
    for an unknown one (else they are refused with `UnknownModelError`). The `balancer` says which of the equivalents
    is best.

    Passed over are targets whose circuit is open, that cool down (`cool_down` seconds after a 429 that does not say
    how long), whose credentials are used up or dead, whose context window is too small, or that cannot do what is
    asked. One that could not be asked gets its share again within `slow_start` seconds. Attempts that a target's own
    limits refuse go to the next one and cost nothing. While all equivalents cool down a call waits up to `patience`
    seconds, then goes on to the next model; where there is none it waits up to `max_wait`. `Retry`, outside, makes a
    failed attempt again: at once elsewhere, or later.

    With `name_target` replies say in `x-resilient-llm-target` who answered. Raises `NoTargetError`, which says of
    each target why not and when the first can be asked again, or what the last one refused with.
    """

    targets: Targets
    _: KW_ONLY
    fallbacks: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    default: str | None = None
    balancer: Balancer = field(default_factory=WeightedLeastConnections)
    patience: float = 10.0
    max_wait: float = 120.0
    cool_down: float = 1.0
    slow_start: float = 30.0
    estimate: Estimate = field(default_factory=TokenEstimate)
    name_target: bool = True
    random: Random = field(default_factory=Random, repr=False)
    name: str = "router"
    placement: ClassVar[Placement] = Placement.ROUTER
    _models: Models = field(init=False, repr=False)
    _fleet: Fleet = field(init=False, repr=False)
    _stored: StoredAnswers = field(init=False, repr=False, default_factory=StoredAnswers)
    _circuits: list[CircuitBreaker] = field(init=False, repr=False, default_factory=list)
    _untold: deque[TargetChange] = field(
        init=False, repr=False, default_factory=lambda: deque(maxlen=_MAX_UNTOLD)
    )
    _loop: LoopBound = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seconds(
            patience=self.patience,
            max_wait=self.max_wait,
            cool_down=self.cool_down,
            slow_start=self.slow_start,
            zero=True,
        )
        flag(name_target=self.name_target)
        label(name=self.name)
        offers(("order", "score"), "balancers (see resilient_llm.routing.balancers)", balancer=self.balancer)
        function(estimate=self.estimate)
        instance_of(Random, random=self.random)
        object.__setattr__(self, "_models", Models(self.targets, self.fallbacks, self.default))
        object.__setattr__(self, "_loop", LoopBound(self.name, self._forget))
        self._forget()

    @property
    def models(self) -> Collection[str] | None:
        """Give the models that calls may ask for; `None` for any, as with a `default` or one list of targets."""
        return self._models.names

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` when a target's own policies cannot stand where they do."""
        after = policies[policies.index(self) + 1 :]
        for target in self._models.every_target():
            target.check()
            target.price_for("-")  # the list of prices is loaded now, not while a call waits
            for policy in target.policies:
                if getattr(policy, "placement", Placement.CHAOS) < Placement.ADMISSION or any(
                    policy is other for other in policies
                ):
                    msg = f"{policy_name(policy)} cannot be one of the policies of target {target.name!r}"
                    raise ConfigurationError(msg)
            check_order([self, *target.policies, *after], "client")

        known = self._circuits
        known.extend(policy for policy in after if isinstance(policy, CircuitBreaker) and policy not in known)

    def observe(self, telemetry: Telemetry) -> None:
        """Let the targets' own policies report their gauges."""
        for policy in _unique(policy for target in self._models.every_target() for policy in target.policies):
            observe = getattr(policy, "observe", None)
            if observe is not None:
                observe(telemetry)

    def _forget(self) -> None:
        fleet = Fleet(
            self._models.targets,
            cool_down=self.cool_down,
            slow_start=self.slow_start,
            estimate=self.estimate,
            stored=self._stored,
        )
        object.__setattr__(self, "_fleet", fleet)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Send an attempt to a target, and to the next one as long as they refuse it."""
        now = call.loop.time()
        route = self._route(call, now)
        waits_since: float | None = None
        while True:
            deployment, rejected = route.choose(call, now)
            if deployment is None:
                waits_since = await self._go_without(call, route, rejected, waits_since)
                now = call.loop.time()
                continue
            waits_since = None
            if call.telemetry.recording:
                self._report(call, route, rejected, deployment)
            mark = call.mark()
            try:
                route.send(call, deployment, now)
                reply = await deployment.chain(call_next)(call)
            except RejectedError as error:
                await call.retract(mark)
                route.refused(call, deployment, error)
                now = call.loop.time()
                continue
            route.answered = deployment
            if self.name_target:
                headers = reply.headers
                if header(headers, ANSWERED_BY) is not None:  # of another router, behind the target
                    headers = without(headers, ANSWERED_BY)
                reply.headers = [*headers, deployment.header]
            return reply

    def _route(self, call: Call, now: float) -> Route:
        """Give the call's route, made for its first attempt."""
        owner = call.parent or call
        route = owner.route
        if isinstance(route, Route):
            if route.needs.request is not call.request:  # it goes on with an answer, say
                place = self._place_of(self._kept_by(call, now), route.chain)
                route.needs = Needs(call, self.estimate, place, route.needs.larger_than)
            return route
        if self._loop.loop is not call.loop:
            self._loop.bind(call.loop)
        while self._untold:
            call.telemetry.event(call, TARGET_CHANGE, self._untold.popleft().attributes())
        kept_by = self._kept_by(call, now)
        model = owner.logical_model or owner.profile.model
        if model is None and kept_by is not None:  # to read a stored answer, say
            model = self._models.of(kept_by.target)
        chain = self._chain(model)
        needs = Needs(call, self.estimate, self._place_of(kept_by, chain))
        route = owner.route = Route(chain, needs, self.balancer, self.patience, self.random, self._report)
        return route

    def _kept_by(self, call: Call, now: float) -> Deployment | None:
        """Give who keeps the stored answer that a call refers to, where that is known."""
        name = self._stored.target_of(call.request, now)
        return None if name is None else self._fleet.deployment(name)

    @staticmethod
    def _place_of(kept_by: Deployment | None, chain: Sequence[Group]) -> object:
        """Give where the targets are of a chain that keep a stored answer, too; `None` when none does."""
        if kept_by is None:
            return None
        places = (deployment.place for group in chain for deployment in group.deployments.values())
        return kept_by.place if kept_by.place in places else None

    async def _go_without(
        self, call: Call, route: Route, rejected: Sequence[str], waits_since: float | None
    ) -> float | None:
        """Wait for a target, or go on to the next model; raise when neither is of use.

        Gives since when the call waits for the model it is at now; `None` when it does not yet.
        """
        now = call.loop.time()
        hedge = call.reason == "hedge"
        since = now if waits_since is None else waits_since
        patience = self.patience if route.has_next(call) else self.max_wait
        wait, spread, pools = route.queueing(call)
        # How long others will use a credential nobody knows: then it is the whole wait that has an end.
        limit = 0.0 if hedge else min(since + patience - now if pools else patience, call.remaining())
        if limit > 0 and (pools or wait <= limit + ROUNDING):
            if waits_since is None:
                self._report(call, route, rejected)
            soonest = limit if wait > limit else wait + self.random.uniform(0.0, spread)
            await self._wait(call, pools, soonest, again=waits_since is not None)
            return since
        if not hedge and route.next_model(call):
            return None
        passed = route.passed(call)
        error = refusal(passed, route.needs, self.name)
        self._report(call, route, [str(one) for one in passed])
        call.telemetry.rejected(call, error)
        raise error

    async def _wait(
        self, call: Call, pools: Sequence[CredentialPool], seconds: float, *, again: bool
    ) -> None:
        outcome: WaitOutcome = "cancelled"
        since = call.loop.time()
        try:
            await self._fleet.waiting.wait(call, pools, seconds, again=again)
            outcome = "acquired"
        finally:
            call.telemetry.waited(call, self.name, since=since, outcome=outcome, unit="targets")

    def _report(
        self,
        call: Call,
        route: Route,
        rejected: Sequence[str],
        chosen: Deployment | None = None,
    ) -> None:
        """Tell telemetry of a decision."""
        telemetry = call.telemetry
        if not telemetry.recording:
            return
        telemetry.routed(decision(self.balancer, route, rejected, chosen, call.loop.time()))

    def _chain(self, model: str | None) -> tuple[Group, ...]:
        """Give the groups of a model and of those it falls back to."""
        models = self._models.chain(model)
        if models is None:
            raise UnknownModelError(
                f"no targets are declared for model {model!r}; known are {self._models.listed()}",
                name=self.name,
            )
        return self._fleet.chain(models)

    def _groups(self) -> tuple[Group, ...]:
        """Give the groups of all models."""
        return tuple(map(self._fleet.group, self._models.targets))

    def health(self) -> Health:
        """Say how the targets are doing: see `Health`."""
        return report(self._groups(), self._circuits, self._now())

    def _now(self) -> float:
        """Give the time of the loop that is routed in; before the first call 0, and after the last one its end."""
        try:
            return 0.0 if self._loop.loop is None else self._loop.loop.time()
        except RuntimeError:  # trio's clock is gone with its loop
            return math.inf

    # By hand

    def isolate(self, name: str) -> None:
        """Send nothing to a target until `restore`, whatever its circuits say; what is there ends as it would.

        From any thread; in another it takes effect as soon as the event loop comes to it. Raises `ConfigurationError`
        when no target is called so.
        """
        target = self._models.target(name)
        self._by_hand(target, "isolated", lambda fleet: fleet.isolate(name))

    def restore(self, name: str) -> None:
        """Bring a target back: it is not set aside, does not cool down, its keys are good, its circuits closed.

        From any thread, and raises, as `isolate`.
        """
        target = self._models.target(name)
        self._by_hand(target, "restored", lambda fleet: fleet.restore(name))
        deployment = self._fleet.deployment(name)
        circuits = self._circuits if deployment is None else (*deployment.circuits, *self._circuits)
        for circuit in circuits:
            for key in circuits_of(circuit, name):
                circuit.close(key)

    def set_weight(self, name: str, weight: float) -> None:
        """Give a target another weight until told otherwise, in the place of the one it was declared with.

        From any thread, and raises, as `isolate`; also `ConfigurationError` for a weight that is none.
        """
        target = self._models.target(name)
        number(0, _MAX_WEIGHT, inside=True, weight=weight)
        self._by_hand(target, "weighted", lambda fleet: fleet.weigh(name, weight))

    def has(self, name: str) -> bool:
        """Tell whether one of its targets is called so."""
        return any(target.name == name for target in self._models.every_target())

    def _by_hand(self, target: Target, changed: ByHand, change: Callable[[Fleet], None]) -> None:
        def do(now: float) -> None:
            fleet = self._fleet
            change(fleet)
            fleet.waiting.wake(now)
            told = TargetChange(self.name, target.name, changed, fleet.weight_of(target))
            self._untold.append(told)
            logger.warning("%s", told)

        if self._loop.loop is None:  # no call has been here yet
            do(0.0)
        else:
            self._loop.run(do)

    def take_over(self, previous: Router) -> None:
        """Go on with what another router knows, which this one is to replace, before the first call.

        Of the targets that both have, the same objects, that is all: calls in flight, latencies, cool-downs, what
        became of credentials; of the others which stored answers they have, and who is set aside. Calls that the
        other one still has count here too. Weights that were set by hand end. In the event loop that both belong to.
        """
        if previous._loop.loop is not None:
            previous._loop.bind()  # if that one's loop is over, nothing it knows is of use
            self._loop.bind()
        object.__setattr__(self, "_stored", previous._stored)
        self._forget()
        self._fleet.take_over(previous._fleet)

    def goes_on(self, model: str | None) -> bool:
        """Tell whether a target that calls for this model may go to has `prefill` among its capabilities.

        For `None`, whether any target has.
        """
        try:
            groups = self._groups() if model is None else self._chain(model)
        except UnknownModelError:
            return False
        targets = (deployment.target for group in groups for deployment in group.deployments.values())
        return any("prefill" in (target.capabilities or ()) for target in targets)

    def dearest(self, model: str | None) -> Price | None:
        """Give the highest price of the targets that calls for a model may go to; of all when it is unknown."""
        try:
            chain = self._chain(model)
        except UnknownModelError:
            chain = self._groups()
        prices = [
            price
            for group in chain
            for deployment in group.deployments.values()
            if (price := deployment.target.price_for(model)) is not None
        ]
        return max(prices, key=lambda price: price.blended, default=None)

    def context_window(self, model: str | None) -> int | None:
        """Give the largest context window of a model's targets, in tokens; `None` when none of them says."""
        models = self._models.chain(model)
        targets = () if models is None else self._models.targets[models[0]]
        return max((target.context_window for target in targets if target.context_window), default=None)


def _unique(policies: Iterable[Policy]) -> Iterator[Policy]:
    return iter({id(policy): policy for policy in policies}.values())
