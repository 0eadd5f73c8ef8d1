"""Which fault comes when: scripts of faults over a run of requests, over time, or by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ._checks import is_number
from ._fault import OK, Fault
from ._request_log import ProviderRequest

Script: TypeAlias = Callable[[ProviderRequest], Fault]
"""Chooses the fault for a request; called once for each request that the provider's limits let in."""


def steps(faults: Iterable[Fault]) -> Script:
    """Play `faults` one a request, then none. An iterator may be endless; a sequence is checked at once."""
    if isinstance(faults, Sequence):
        for fault in faults:
            checked(fault)
    remaining = iter(faults)
    return lambda _request: checked(next(remaining, OK))


def flapping(*, up: float, down: float, fault: Fault = Fault(status=503)) -> Script:  # noqa: B008 - immutable
    """Serve for `up` seconds, then show `fault` for `down` seconds, and so on, from the first request on."""
    for name, value in (("up", up), ("down", down)):
        if not (is_number(value) and value > 0):
            raise ValueError(f"{name} must be > 0 seconds, got {value!r}")
    start: float | None = None

    def choose(request: ProviderRequest) -> Fault:
        nonlocal start
        start = request.arrived if start is None else start
        return OK if (request.arrived - start) % (up + down) < up else fault

    return choose


def random_faults(chances: Iterable[tuple[float, Fault]], *, rng: random.Random) -> Script:
    """Show each fault with its probability, none otherwise; one draw from `rng` a request."""
    table = [(probability, checked(fault)) for probability, fault in chances]
    probabilities = [probability for probability, _ in table]
    if not all(is_number(one) and one >= 0 for one in probabilities) or sum(probabilities) > 1 + 1e-9:
        raise ValueError(f"probabilities must be >= 0 and add up to at most 1, got {probabilities}")

    def choose(_request: ProviderRequest) -> Fault:
        draw = rng.random()
        for probability, fault in table:
            draw -= probability
            if draw < 0:
                return fault
        return OK

    return choose


def checked(fault: object) -> Fault:
    """Return what a script chose, if it is a Fault. Raises TypeError if not."""
    if not isinstance(fault, Fault):
        raise TypeError(f"a script is made of Fault values, got {fault!r}")
    return fault
