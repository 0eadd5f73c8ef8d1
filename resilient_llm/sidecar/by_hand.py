"""What operators change while it runs: targets that are set aside, weights, canaries.

Finds what is meant, and has the library do it; what a change is worth, and who is told of it, is the library's
to say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from resilient_llm.errors import ConfigurationError

if TYPE_CHECKING:
    from resilient_llm.core.sample import Sample
    from resilient_llm.policies import CircuitBreaker
    from resilient_llm.routing import Canary
    from resilient_llm.routing.router import Router
    from resilient_llm.sidecar.build import Setup

__all__ = ["NotDoneError", "canaries", "change_canary", "isolate", "restore", "set_weight"]

_CANARY_FORM = 'a share from 0 to 1, a step from 0, or do: "hold", "promote", "roll_back" or "resume"'


class NotDoneError(Exception):
    """Something that was asked for by hand, and cannot be done; `status` is that of an HTTP reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def isolate(setup: Setup, name: str) -> list[str]:
    """Set a target aside: one of the configuration with all its models, or one as it is called in the health report.

    Its circuits are isolated too, so that whoever shares them leaves it alone as well. Gives what it is called where
    it was set aside. Raises `NotDoneError`.
    """
    places = _places(setup, name)
    for called, router in places:
        router.isolate(called)
    for breaker, key in _circuits(setup, name):
        breaker.isolate(key)
    return _names(places)


def restore(setup: Setup, name: str) -> list[str]:
    """Take a target back: it is not set aside, cools down no longer, its circuits are closed. As `isolate`."""
    places = _places(setup, name)
    for called, router in places:
        router.restore(called)
    for breaker, key in _circuits(setup, name):
        breaker.close(key)
    return _names(places)


def set_weight(setup: Setup, name: str, body: bytes) -> list[str]:
    """Give a target the weight that a body says, until the next reload. As `isolate`."""
    places = _places(setup, name)
    given = _read(body, 'a weight above 0: {"weight": 2.5}')
    if given.keys() != {"weight"}:
        raise NotDoneError(422, 'expected is a weight above 0: {"weight": 2.5}')
    for called, router in places:
        try:
            router.set_weight(called, cast("float", given["weight"]))
        except ConfigurationError as error:
            raise NotDoneError(422, str(error)) from None
    return _names(places)


def change_canary(setup: Setup, name: str, body: bytes) -> Mapping[str, object]:
    """Change a canary as a body says, and give how it stands then. Raises `NotDoneError`."""
    canary = setup.canaries.get(name)
    if canary is None:
        raise NotDoneError(404, "there is no such canary")
    match _read(body, _CANARY_FORM):
        case {"share": share, **rest} if not rest:
            try:
                canary.set_share(cast("float", share))
            except ConfigurationError as error:
                raise NotDoneError(422, str(error)) from None
        case {"step": int(step), **rest} if not rest and not isinstance(step, bool):
            if not 0 <= step < len(canary.steps):
                raise NotDoneError(
                    422, f"step={step}: allowed are whole numbers from 0 to {len(canary.steps) - 1}"
                )
            canary.set_share(canary.steps[step])
            canary.resume()
        case {"do": "hold", **rest} if not rest:
            canary.set_share(canary.status().share)
        case {"do": "promote", **rest} if not rest:
            canary.promote()
        case {"do": "roll_back", **rest} if not rest:
            canary.roll_back()
        case {"do": "resume", **rest} if not rest:
            canary.resume()
        case _:
            raise NotDoneError(422, f"expected is {_CANARY_FORM}")
    return _standing(canary)


def canaries(setup: Setup) -> dict[str, Mapping[str, object]]:
    """Say how each canary stands."""
    return {name: _standing(canary) for name, canary in setup.canaries.items()}


def _standing(canary: Canary) -> Mapping[str, object]:
    status = canary.status()
    return {
        "model": canary.model,
        "candidate": canary.candidate,
        "state": status.state.value,
        "share": status.share,
        "step": status.step,
        "steps": list(canary.steps),
        "waits_for": status.waits_for,
        "restarts_in": status.restarts_in if status.restarts_in < math.inf else None,
        "seen": _seen(status.seen),
        "seen_of_baseline": _seen(status.seen_of_baseline),
    }


def _seen(sample: Sample) -> Mapping[str, object]:
    return {
        "calls": sample.calls,
        "errors": sample.errors,
        "client_errors": sample.client_errors,
        "p99_first_token": sample.p99_first_token,
    }


def _read(body: bytes, form: str) -> Mapping[str, object]:
    try:
        given: object = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise NotDoneError(400, f"the body is no JSON object; expected is {form}")
    return cast("Mapping[str, object]", given)


def _places(setup: Setup, name: str) -> list[tuple[str, Router]]:
    places = setup.places.get(name)
    if places is None:
        places = [place for every in setup.places.values() for place in every if place[0] == name]
    if not places:
        raise NotDoneError(404, "there is no such target")
    return list(places)


def _names(places: list[tuple[str, Router]]) -> list[str]:
    return list(dict.fromkeys(called for called, _ in places))


def _circuits(setup: Setup, name: str) -> list[tuple[CircuitBreaker, str | tuple[str, ...]]]:
    """Give the circuits of a target that there are."""
    known = setup.circuits.get(name)
    if known is None:
        known = [one for every in setup.circuits.values() for one in every if one[0] == name]
    return [(breaker, key) for called, breaker in known for key in _keys(called, breaker)]


def _keys(called: str, breaker: CircuitBreaker) -> list[str | tuple[str, ...]]:
    if breaker.key == "target":
        return [called]
    return [key for key in breaker.keys_of(called) if isinstance(key, str | tuple)]
