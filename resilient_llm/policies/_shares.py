"""What a call counts for among tenants, and a tenant among others, as the application says it.

Its functions run while calls wait, so what they raise or get wrong is logged and never breaks a call. Makes the
room that all who compete for slots wait in; who is served next in it must not enter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from resilient_llm._options import at_least, seconds, synchronous, takes
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.policies.tokens import TokenEstimate, estimate_once

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["HEAVIEST", "LIGHTEST", "Cost", "Weights", "cost_function", "fair_room", "weight_function"]

Cost: TypeAlias = Literal["tokens"] | TokenEstimate | Callable[["Call"], float]
"""What a call counts for: its estimated tokens, or what a function of it gives."""

Weights: TypeAlias = Mapping[Any, float] | Callable[[Any], float]
"""What the share of a key is in proportion to; 1 where a mapping says nothing. What keys are, `key=` says."""

Subject = TypeVar("Subject")

_WEIGHTS = "numbers from 1e-6 to 1e6"

LIGHTEST, HEAVIEST = 1e-6, 1e6
"""Weights that there may be: sums of others would lose what is added to them, and so those who have it their turn."""

_CREDIT = 24
"""How many calls early a tenant may be served that had less than its share. With so many, calls that come at random at
up to 80 % of a share wait as if they always came first, once some have come; without any they would wait twice as
long at 50 % of it, and four times at 80 %."""

_ROOM = 10
"""How many tenants with a full queue each there is room for, unless it is told otherwise."""


def fair_room(
    *,
    max_queued: int,
    max_queued_total: int | None,
    weights: Weights | None,
    ageing: float,
) -> WaitingRoom[Hashable]:
    """Make the room in which tenants wait for slots that they share.

    `max_queued` tickets of one tenant have room in it, `max_queued_total` (10 times as many) of all. In a full one
    a tenant within its share of the places takes one of who exceeds theirs. Raises `ConfigurationError` for an
    option out of range.
    """
    at_least(0, max_queued=max_queued)
    seconds(ageing=ageing, zero=True)
    if max_queued_total is None:
        max_queued_total = _ROOM * max_queued
    at_least(max_queued, max_queued_total=max_queued_total)
    return WaitingRoom(
        max_queued_total if max_queued else 0,
        max_queued_per_tenant=max_queued or None,
        weights=weight_function(weights),
        ageing=ageing,
        credit=_CREDIT,
        displaces=True,
    )


def cost_function(cost: Cost | None) -> Callable[[Call], float]:
    """Make the function that says what a call counts for; 1 for each with `None`.

    Raises `ConfigurationError` for anything else than `Cost` allows.
    """
    if cost is None:
        return lambda _call: 1.0
    if cost == "tokens":
        cost = TokenEstimate()
    if isinstance(cost, TokenEstimate):
        estimate = cost
        return lambda call: max(1.0, estimate_once(call, estimate))
    if not callable(cost) or isinstance(cost, type):
        raise ConfigurationError(
            f"cost={cost!r}: allowed are 'tokens', a TokenEstimate, a function of the call, and None"
        )
    synchronous(cost=cost)
    takes(1, cost=cost)
    return _checked("cost", cost, _is_cost, "finite numbers above 0")


def weight_function(weights: Weights | None) -> Callable[[Hashable], float] | None:
    """Make the function that gives a tenant's weight; `None` where all have the same.

    Raises `ConfigurationError` for anything else than `Weights` allows, and for a weight beyond 1e-6 to 1e6.
    """
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        if not callable(weights) or isinstance(weights, type):
            raise ConfigurationError(
                f"weights={weights!r}: allowed are a mapping, a function of the key, and None"
            )
        synchronous(weights=weights)
        takes(1, weights=weights)
        return _checked("weights", weights, _is_weight, _WEIGHTS)
    for tenant, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not _is_weight(weight):
            raise ConfigurationError(f"weights: {weight!r} for {tenant!r}: allowed are {_WEIGHTS}")
    by_tenant = weights
    return lambda tenant: by_tenant.get(tenant, 1.0)


def _is_weight(number: float) -> bool:
    return LIGHTEST <= number <= HEAVIEST


def _is_cost(number: float) -> bool:
    return 0 < number < math.inf


def _checked(
    option: str, function: Callable[[Subject], float], allowed: Callable[[float], bool], what: str
) -> Callable[[Subject], float]:
    """Guard a function of the application's: 1 where it fails or gives a number that is not allowed."""

    def guarded(subject: Subject) -> float:
        try:
            number = float(function(subject))
            if allowed(number):
                return number
            hook_gave(option, function, number, what)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
            hook_failed(option, function, error)
        return 1.0

    return guarded
