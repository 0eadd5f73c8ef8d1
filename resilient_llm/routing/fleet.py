"""The targets of one router as they are known: what is kept of each, and what they share.

A target that answers for several models is one here, with one load and one cool-down; so is a credential that opens
several targets. Which target a call goes to must not be decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.deployment import Deployment
from resilient_llm.routing.route import Group
from resilient_llm.routing.waiting import Waiting

if TYPE_CHECKING:
    from resilient_llm.core.credential_pool import CredentialUse, Terms
    from resilient_llm.policies.tokens import Estimate
    from resilient_llm.routing.stored_answers import StoredAnswers
    from resilient_llm.target import Target

__all__ = ["Fleet"]


class Fleet:
    """Make deployments of targets, each when it is first asked for, and keep them.

    `models` are the targets of each logical model; no two have the same name.
    """

    def __init__(
        self,
        models: Mapping[str, Sequence[Target]],
        *,
        cool_down: float,
        slow_start: float,
        estimate: Estimate,
        stored: StoredAnswers,
    ) -> None:
        self.waiting = Waiting()
        """Calls that wait for a credential."""
        self._models = models
        self._cool_down = cool_down
        self._slow_start = slow_start
        self._estimate = estimate
        self._stored = stored
        self._chains: dict[Sequence[str], tuple[Group, ...]] = {}
        self._groups: dict[str, Group] = {}
        self._deployments: dict[str, Deployment] = {}
        self._credentials: dict[Terms, CredentialUse] = {}
        self._out: dict[Deployment, None] = {}
        self._isolated: set[str] = set()
        self._weights: dict[str, float] = {}

    def take_over(self, previous: Fleet) -> None:
        """Go on with what another fleet knows of the targets that both have, and share it with that one's last calls.

        Targets that were set aside stay so by their names. Weights that were set by hand end.
        """
        self.waiting, self._out, self._credentials = previous.waiting, previous._out, previous._credentials
        targets = {target.name: target for group in self._models.values() for target in group}
        for name, deployment in previous._deployments.items():
            if targets.get(name) is not deployment.target:
                self._out.pop(deployment, None)
                continue
            self._deployments[name] = deployment
            deployment.go_on(cool_down=self._cool_down, slow_start=self._slow_start, estimate=self._estimate)
        self._isolated = previous._isolated & targets.keys()

    def isolate(self, name: str) -> None:
        """Send nothing to a target any more."""
        self._isolated.add(name)
        deployment = self._deployments.get(name)
        if deployment is not None:
            deployment.isolated = True

    def restore(self, name: str) -> None:
        """Send to a target again, whatever it was left alone for."""
        self._isolated.discard(name)
        deployment = self._deployments.get(name)
        if deployment is not None:
            deployment.restore()

    def weigh(self, name: str, weight: float) -> None:
        """Give a target another weight."""
        self._weights[name] = weight
        deployment = self._deployments.get(name)
        if deployment is None:
            return
        load = deployment.load
        load.weight = weight
        for model, group in self._groups.items():
            if load in group.deployments:
                self._groups[model] = group._replace(pool=Pool(group.pool.loads))
        self._chains.clear()

    def weight_of(self, target: Target) -> float:
        """Give the weight that a target has: its own, or the one it was given."""
        return self._weights.get(target.name, target.weight)

    def deployment(self, name: str) -> Deployment | None:
        """Give what is known of the target of that name; `None` while nothing is."""
        return self._deployments.get(name)

    def chain(self, models: tuple[str, ...]) -> tuple[Group, ...]:
        """Give the groups of some models."""
        chain = self._chains.get(models)
        if chain is None:
            chain = self._chains[models] = tuple(map(self.group, models))
        return chain

    def group(self, model: str) -> Group:
        """Give the equivalent targets of a model."""
        group = self._groups.get(model)
        if group is None:
            deployments = [self._deployed(target, model) for target in self._models[model]]
            loads = {deployment.load: deployment for deployment in deployments}
            group = self._groups[model] = Group(model, Pool(tuple(loads)), loads, self._out)
        return group

    def _deployed(self, target: Target, model: str) -> Deployment:
        deployment = self._deployments.get(target.name)
        if deployment is None:
            price = target.price_for(model)  # what a model of unknown name costs its name may tell
            load = TargetLoad(
                target.name,
                weight=self.weight_of(target),
                price=0.0 if price is None else price.blended,
                slow_start=self._slow_start,
            )
            deployment = self._deployments[target.name] = Deployment(
                target,
                load,
                self._out,
                cool_down=self._cool_down,
                estimate=self._estimate,
                credentials=self._credentials,
                waiting=self.waiting,
                stored=self._stored,
            )
            deployment.isolated = target.name in self._isolated
        return deployment
