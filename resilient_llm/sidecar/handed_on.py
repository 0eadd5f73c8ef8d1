"""What was changed by hand, as it stands: taken of one process, and given to another of the same configuration.

Not what was asked for: what an order or a reload comes to depends on what there was before, and names overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from resilient_llm.core.canary import RolloutState
from resilient_llm.core.circuit_state import CircuitState

if TYPE_CHECKING:
    from resilient_llm.policies import CircuitBreaker
    from resilient_llm.routing import Canary
    from resilient_llm.routing.router import Router
    from resilient_llm.sidecar.build import Setup

__all__ = ["ByHand", "Standing", "give", "place", "taken"]


class Standing(TypedDict):
    """Say how a canary stands."""

    state: str
    share: float


class ByHand(TypedDict):
    """Say what was changed by hand; routers go by the target whose door they are behind, the common one by none."""

    isolated: list[tuple[str | None, str]]
    weights: list[tuple[str | None, str, float]]
    circuits: list[tuple[str, str]]
    """By the target that has them; also those of models that it has not at present, which may come back."""
    canaries: dict[str, Standing]


def taken(setup: Setup) -> ByHand:
    """Say what was changed by hand, and is as it would not be by itself."""
    weights: dict[tuple[str | None, str], float] = {}
    isolated: dict[tuple[str | None, str], None] = {}
    for door, router in _routers(setup).items():
        for target in router.health().targets:
            if "isolated" in target.by_hand:
                isolated[door, target.name] = None
            if "weight" in target.by_hand:
                weights[door, target.name] = target.weight
    return {
        "isolated": list(isolated),
        "weights": [(door, name, weight) for (door, name), weight in weights.items()],
        "circuits": [
            (target, key)
            for target, breaker in _circuits(setup).items()
            for key, state in breaker.states().items()
            if state is CircuitState.ISOLATED and isinstance(key, str)
        ],
        "canaries": {name: _standing(canary) for name, canary in setup.canaries.items() if _is_moved(canary)},
    }


def give(setup: Setup, by_hand: ByHand) -> None:
    """Have things stand so where nothing has been changed yet."""
    routers = _routers(setup)
    for door, name in by_hand["isolated"]:
        routers[door].isolate(name)
    for door, name, weight in by_hand["weights"]:
        routers[door].set_weight(name, weight)
    circuits = _circuits(setup)
    for target, key in by_hand["circuits"]:
        if circuits[target].store is None:  # what is shared others have told the store
            circuits[target].isolate(key)
    for name, standing in by_hand["canaries"].items():
        place(setup.canaries[name], standing)


def place(canary: Canary, standing: Standing) -> None:
    """Have a canary stand so, wherever it was."""
    match RolloutState(standing["state"]):
        case RolloutState.PROMOTED:
            canary.promote()
        case RolloutState.ROLLED_BACK:
            canary.roll_back()
        case RolloutState.HELD:
            canary.set_share(standing["share"])
        case RolloutState.RUNNING:  # the share is that of a step, from which it goes on
            canary.set_share(standing["share"])
            canary.resume()


def _routers(setup: Setup) -> Mapping[str | None, Router]:
    routers: dict[str | None, Router] = {None: setup.router}
    return routers | dict(setup.alone)


def _circuits(setup: Setup) -> Mapping[str, CircuitBreaker]:
    """Give, by their targets, the circuits that can be isolated before any call: those that go by what it is called."""
    return {
        target: breaker
        for target, known in setup.circuits.items()
        for _, breaker in known
        if breaker.key == "target"
    }


def _standing(canary: Canary) -> Standing:
    status = canary.status()
    return {"state": status.state.value, "share": status.share}


def _is_moved(canary: Canary) -> bool:
    """Tell whether a canary stands where a new one would not: one whose time to cool off is over begins anew."""
    status = canary.status()
    return status.step != 0 and status.restarts_in > 0
