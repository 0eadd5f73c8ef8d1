"""Who may still come into a full waiting room, and which tenant has to make way.

The rule alone, as arithmetic on how many places tenants take up. Which of a tenant's calls goes, and how it is told,
must not enter here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["is_within_share", "who_makes_way"]

Tenant = TypeVar("Tenant")

_ROUNDING = 1e-9


def is_within_share(calls: int, weight: float, weights: float, places: int) -> bool:
    """Tell whether so many calls are within a tenant's share of the places.

    `weights` are those of all tenants that have calls in the room, this one's included.
    """
    return calls * weights <= places * weight * (1 + _ROUNDING)


def who_makes_way(tenants: Iterable[tuple[Tenant, int, float]], weights: float, places: int) -> Tenant | None:
    """Choose the tenant that exceeds its share of the places most; `None` when nobody does who has a call to spare.

    `tenants` are those in the room, each with its calls and its weight. One within its share is never chosen, nor one
    with a single call: what is first in a tenant's line stays. Where one more call is within its own tenant's share
    of a full room, somebody exceeds theirs.

    Source: the longest queue is pushed out (Suter, Lakshman, Stiliadis & Choudhury, "Design considerations for
    supporting TCP with per-flow queueing", INFOCOM 1998), here by weight.
    """
    chosen: Tenant | None = None
    most = places * (1 + _ROUNDING) / weights
    for tenant, calls, weight in tenants:
        if calls > 1 and calls / weight > most:
            chosen, most = tenant, calls / weight
    return chosen
