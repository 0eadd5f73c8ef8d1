"""What telemetry is told of a decision where an attempt goes: the candidates, their scores, and what was passed over.

Nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from resilient_llm.telemetry.silent import Routing

if TYPE_CHECKING:
    from resilient_llm.routing.balancers import Balancer
    from resilient_llm.routing.deployment import Deployment
    from resilient_llm.routing.route import Route

__all__ = ["decision"]

_MAX_SHOWN = 16
"""Targets that one span lists."""


def decision(
    balancer: Balancer, route: Route, rejected: Sequence[str], chosen: Deployment | None, now: float
) -> Routing:
    """Write down a decision; `rejected` are the targets that were passed over, as `target:why`."""
    group = route.group
    # Of many targets those that say something: the one chosen, and those passed over.
    shown = [
        load
        for load in group.deployments
        if len(group.deployments) <= _MAX_SHOWN or group.deployments[load] is chosen
    ]
    return Routing(
        strategy=balancer.strategy,
        reason="fallback" if route.fell_back else balancer.reason,
        candidates=[load.name for load in shown],
        scores=[balancer.score(load, group.pool, route.needs, now) for load in shown],
        rejected=rejected[:_MAX_SHOWN],
        selected=None if chosen is None else chosen.target.name,
        previous=None if route.last is None else route.last.target.name,
    )
