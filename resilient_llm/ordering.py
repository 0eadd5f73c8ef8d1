"""Where each policy may stand, checked when a pipeline is built, with the reason in the error.

Only structure is decided here. A policy of the library says its place with a class attribute
`placement`; anything without one is the user's own and may stand anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

from resilient_llm.errors import ConfigurationError

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext, Policy
    from resilient_llm.message import Reply

__all__ = ["Door", "Placement", "attempt_boundary", "chained", "check_order", "policy_name"]

Door: TypeAlias = Literal["client", "asgi", "callable"]


class Placement(IntEnum):
    """Where in a pipeline a policy stands, outermost first."""

    DEADLINE = 0
    ADMISSION = 1
    """Limits on whole calls; the same policies after a replaying one limit single attempts."""
    CACHE = 2
    TIERS = 3
    CANARY = 4
    CONTEXT = 5
    STREAM = 6
    RETRY = 7
    HEDGE = 8
    ROUTER = 9
    ATTEMPT_RATE = 10
    ATTEMPT_CONCURRENCY = 11
    BREAKER = 12
    ATTEMPT_CLOCKS = 13
    CHAOS = 14


_REPLAYING = {Placement.RETRY, Placement.HEDGE, Placement.ROUTER}
_SINGLE = {
    Placement.DEADLINE,
    Placement.CONTEXT,
    Placement.STREAM,
    Placement.RETRY,
    Placement.HEDGE,
    Placement.ROUTER,
}
_ASGI = {Placement.DEADLINE, Placement.ADMISSION}

_WHY = {
    Placement.DEADLINE: "a deadline must cover every queue, attempt and backoff, so it stands outermost",
    Placement.ADMISSION: "a limit on calls stands outside what repeats them, or every retry would queue again",
    Placement.CACHE: "a cached answer must cost no attempt",
    Placement.TIERS: "a tier is chosen once for a call, whatever is then tried",
    Placement.CANARY: "a call stays with the canary or without it, however often it is tried",
    Placement.CONTEXT: "a prompt is made to fit once the model is chosen, before anything is sent",
    Placement.STREAM: "a stream is resumed outside the retries that begin it",
    Placement.RETRY: "each retry must pass hedging, routing and the circuit anew",
    Placement.HEDGE: "each hedge must be routed anew",
    Placement.ROUTER: "a target is chosen before its own limits and circuit are asked",
    Placement.ATTEMPT_RATE: "a rate limit waits before a slot is held",
    Placement.ATTEMPT_CONCURRENCY: "no half-open probe may wait in a queue",
    Placement.BREAKER: "a circuit admits last, just before sending; outside a retry it would count calls, not attempts",
    Placement.ATTEMPT_CLOCKS: "an attempt's clocks start when it is sent, after every wait",
    Placement.CHAOS: "injected faults must look like the provider's own, so they stand innermost",
}


def policy_name(policy: object) -> str:
    """Give the name a policy goes by: its `name` when it has one, else its class or function name."""
    name = getattr(policy, "name", None)
    if isinstance(name, str) and name:
        return name
    return getattr(policy, "__name__", type(policy).__name__)


def _placement(policy: object) -> Placement | None:
    placement = getattr(policy, "placement", None)
    return placement if isinstance(placement, Placement) else None


def attempt_boundary(policies: Sequence[object]) -> int:
    """Give the index of the first policy that acts on single attempts: after what makes them, else the first such."""
    for index, policy in enumerate(policies):
        placement = _placement(policy)
        if placement is Placement.RETRY:
            return index + 1
        if placement is not None and placement > Placement.RETRY:
            return index
    return len(policies)


def chained(policies: Sequence[Policy], call_next: CallNext) -> CallNext:
    """Give what takes a call through policies, outermost first, to what comes after them."""
    for policy in reversed(policies):
        call_next = _step(policy, call_next)
    return call_next


def _step(policy: Policy, call_next: CallNext) -> CallNext:
    """Bind a policy to the rest of the chain, by position: it may call its parameters what it likes."""
    enter = policy.__call__  # bound once: calling the object would look it up each time

    def step(call: Call) -> Awaitable[Reply]:
        return enter(call, call_next)

    return step


def check_order(policies: Sequence[object], door: Door) -> None:
    """Raise `ConfigurationError` when policies stand where they cannot do what they promise."""
    if door == "asgi":
        _check_asgi(policies)
    for index, policy in enumerate(policies):
        if _placement(policy) is not None and any(policy is other for other in policies[:index]):
            msg = (
                f"{policy_name(policy)} stands twice in the list of policies: a call that has what it limits would "
                "wait for itself; make two of them"
            )
            raise ConfigurationError(msg)
    seen: list[tuple[Placement, object]] = []
    replayed = False
    for policy in policies:
        placement = _placement(policy)
        if placement is None:
            continue
        if placement is Placement.ADMISSION and replayed:
            placement = getattr(policy, "attempt_placement", Placement.ATTEMPT_CONCURRENCY)
        for earlier, other in seen:
            if earlier > placement:
                msg = (
                    f"{policy_name(policy)} must stand before {policy_name(other)} in the list of policies "
                    f"(outermost first): {_WHY[placement]}"
                )
                raise ConfigurationError(msg)
            if earlier is placement and placement in _SINGLE:
                msg = (
                    f"two policies of one kind ({policy_name(other)}, {policy_name(policy)}): "
                    "one pipeline has room for one of them"
                )
                raise ConfigurationError(msg)
        seen.append((placement, policy))
        replayed = replayed or placement in _REPLAYING


def _check_asgi(policies: Sequence[object]) -> None:
    for policy in policies:
        placement = _placement(policy)
        if placement is None or placement in _ASGI:
            continue
        if placement in _REPLAYING:
            msg = (
                f"{policy_name(policy)} replays calls, which cannot be done to a request that is being answered; "
                "put it on the transport of your LLM client"
            )
        else:
            msg = (
                f"{policy_name(policy)} has no meaning at the ASGI door; only Deadline, Bulkhead and RateLimit "
                "stand there, the rest belongs on the transport of your LLM client"
            )
        raise ConfigurationError(msg)
