"""One target as a router knows it: how much it has to do, and whether it may be asked now.

What a call has tried already is the route's to remember; which of the usable targets is best, a balancer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from resilient_llm.core.credential_pool import CredentialPool
from resilient_llm.ordering import chained
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.policies.circuit_breaker import CircuitBreaker
from resilient_llm.providers import UNKNOWN
from resilient_llm.routing.cool_down import LONGEST_HINT, CoolDown
from resilient_llm.routing.costs import attempt_cost
from resilient_llm.routing.health import Durations
from resilient_llm.routing.rewrite import rewrite

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.core.credential_pool import CredentialUse, Terms
    from resilient_llm.core.target_load import TargetLoad
    from resilient_llm.policies.tokens import Estimate
    from resilient_llm.routing.needs import Needs
    from resilient_llm.routing.stored_answers import StoredAnswers
    from resilient_llm.routing.waiting import Waiting
    from resilient_llm.target import Target

__all__ = ["ANSWERED_BY", "ELSEWHERE", "Deployment"]

ANSWERED_BY = b"x-resilient-llm-target"
"""The header that names the target a reply is from."""

ELSEWHERE = "stored_elsewhere"
"""Why a call is none for a target: it goes on from an answer that another one keeps."""

_SOON = 1.0
"""Seconds after which a call that asks how long it takes may know more: nobody knows when calls end."""

_SUCCESS = Verdict.SUCCESS

Failed: TypeAlias = "Callable[[Call, Deployment, Outcome], None]"
"""Hear that an attempt has ended without success, once its deployment has learnt from that."""


class Deployment:
    """Keep what is known of one target, and send attempts to it.

    A throttled target, and one that says when to come back, cools down: until then it is not asked. `cool_down` is
    for how long, in seconds, when it does not say. Of a router's targets those are in `out` that could not be asked of
    late, and have not answered since: they are to come back slowly. What is known of credentials is in `credentials`,
    which other deployments share; who waits for one is in `waiting`. All methods take `now` of the loop's clock.
    """

    __slots__ = (
        "_chain",
        "_chained",
        "_estimate",
        "_is_priced",
        "_out",
        "_particular",
        "_stored",
        "_waiting",
        "attempts",
        "circuits",
        "cooling",
        "credentials",
        "durations",
        "failures",
        "header",
        "isolated",
        "load",
        "place",
        "target",
    )

    def __init__(
        self,
        target: Target,
        load: TargetLoad,
        out: dict[Deployment, None],
        *,
        cool_down: float,
        estimate: Estimate,
        credentials: MutableMapping[Terms, CredentialUse],
        waiting: Waiting,
        stored: StoredAnswers,
    ) -> None:
        self.target = target
        self.place = (target.url, target.credentials, tuple(target.headers.items()))
        """What targets have in common that find each other's stored answers."""
        self.header = (ANSWERED_BY, target.name.encode())
        """What a reply says of where it is from."""
        self.load = load
        self.credentials = (
            CredentialPool(target.credentials, known=credentials) if target.credentials else None
        )
        self.cooling = CoolDown(cool_down)
        self.isolated = False
        """Whether it was set aside by hand: nothing is sent there."""
        self._waiting = waiting
        self._stored = stored
        self.attempts = 0
        self.failures = 0
        self.durations = Durations()
        # Most take whatever they are asked.
        limits = (target.dialect, target.capabilities, target.context_window)
        self._particular = any(limit is not None for limit in limits)
        self._is_priced = target.price is not None or target.provider is not None
        self._out = out
        self._estimate = estimate
        self.circuits = tuple(policy for policy in target.policies if isinstance(policy, CircuitBreaker))
        self._chained: CallNext | None = None
        self._chain: CallNext | None = None

    def why_not(self, call: Call, needs: Needs, now: float) -> str | None:
        """Say why an attempt may not be sent here now; `None` when it may."""
        if self.isolated:
            self._out[self] = None
            return "isolated"
        if self._particular or needs.is_particular:
            why = self.never(needs)
            if why is not None:
                return why
        cooling = self.cooling
        if now < cooling.until or (cooling.on_trial and self.load.in_flight):
            return "cooling_down"
        pool = self.credentials
        waiting = self._waiting
        if pool is not None and (
            not pool.is_ready(now, call.purpose) or (waiting.deciding and waiting.is_others_turn(call, pool))
        ):
            if pool.wait(now, call.purpose, patience=0.0) < math.inf:
                return "credential_busy"
            why = "no_credential"
        elif self._reopens_in(call) > 0:
            why = "circuit_open"
        else:
            return None
        self._out[self] = None
        return why

    @property
    def _is_being_tried(self) -> bool:
        return self.cooling.on_trial and self.load.in_flight > 0

    def wants_probe(self, call: Call, needs: Needs, now: float) -> bool:
        """Tell whether it can be asked again, and nobody is finding out yet how it is."""
        return not self.load.in_flight and self.why_not(call, needs, now) is None

    def usable_in(
        self, call: Call, needs: Needs, now: float, *, delay: float = 0.0, patience: float = 0.0
    ) -> float:
        """Give the seconds, at least `delay`, until an attempt may be sent here, if others do not use its credentials.

        Infinity when none may ever, or when its circuit will not be closed, or none of its credentials tried again,
        within `patience`.
        """
        patience = max(delay, patience)
        reopens = math.inf if self.isolated else self._reopens_in(call)
        if reopens > patience or self._is_being_tried or self.never(needs) is not None:
            return math.inf
        wait = max(delay, reopens, self.cooling.until - now)
        if self.credentials is None:
            return wait
        return max(wait, self.credentials.wait(now, call.purpose, patience=patience))

    def back_in(self, call: Call, needs: Needs, now: float) -> float:
        """Give the seconds until it can be asked again as things stand; infinity when the call is none for it."""
        if self.isolated or self.never(needs) is not None:
            return math.inf
        wait = max(
            0.0, self.cooling.until - now, self._reopens_in(call), _SOON if self._is_being_tried else 0.0
        )
        if self.credentials is None:
            return wait
        return max(wait, self.credentials.available_in(now, call.purpose))

    def never(self, needs: Needs) -> str | None:
        """Say why a call cannot be carried out here at all; `None` when it can."""
        target = self.target
        if needs.place is not None and needs.place != self.place:
            return ELSEWHERE
        if needs.continues and "prefill" not in (target.capabilities or ()):
            return "prefill"
        if target.dialect is not None and needs.dialect not in (target.dialect, UNKNOWN.name):
            return "dialect"
        if target.capabilities is not None and not needs.capabilities.issubset(target.capabilities):
            return "capabilities"
        return None if needs.fits(target.context_window) else "context_window"

    def other_credential(self, call: Call) -> bool:
        """Tell whether there is a credential that the call may have now, after one was throttled."""
        now = call.loop.time()
        pool = self.credentials
        if pool is None or self.isolated:
            return False
        return now >= self.cooling.until and pool.is_ready(now, call.purpose)

    def restore(self) -> None:
        """Forget that it was set aside, that it cools down, and what its credentials were refused for."""
        self.isolated = False
        self.cooling.end()
        if self.credentials is not None:
            for index in range(len(self.credentials)):
                self.credentials.restore(index)

    def go_on(self, *, cool_down: float, slow_start: float, estimate: Estimate) -> None:
        """Be another router's from now on, which has these options; a weight that was set by hand ends."""
        self.cooling.usual, self._estimate = cool_down, estimate
        self.load.slow_start, self.load.weight = slow_start, self.target.weight
        self._chained = self._chain = None  # or the other router's pipeline would be kept

    def _reopens_in(self, call: Call) -> float:
        circuits = (call.parent or call).circuits
        circuits = (*self.circuits, *circuits) if circuits else self.circuits
        if not circuits:
            return 0.0
        asked, call.target = call.target, self.target  # circuits go by it
        longest = 0.0
        try:
            for circuit in circuits:
                longest = max(longest, circuit.reopens_in(call))
        finally:
            call.target = asked
        return longest

    def take(self, call: Call, now: float, failed: Failed) -> None:
        """Make an attempt one of this target's: its request, its credential, its place in the load.

        `failed` hears when it has ended without success.
        """
        target, pool = self.target, self.credentials
        index = None if pool is None else pool.take(now, call.purpose)
        call.on_finish(partial(self._finished, call, failed, index, now))
        self.load.sent(now, call.tokens or 0.0)
        secret = None if index is None else target.secret(index)
        call.direct(target, rewrite(call.request, target, secret))

    def chain(self, call_next: CallNext) -> CallNext:
        """Give what carries out attempts here: the target's own policies, then the rest of the pipeline."""
        if not self.target.policies:
            return call_next
        if self._chained is not call_next or self._chain is None:
            self._chained, self._chain = call_next, chained(self.target.policies, call_next)
        return self._chain

    def _finished(
        self, call: Call, failed: Failed, index: int | None, taken: float, outcome: Outcome
    ) -> None:
        now = call.ended
        try:
            self._note(call, index, taken, now, outcome)
            if index is not None:
                self._waiting.wake(now)
        finally:
            if outcome.verdict is not _SUCCESS:
                failed(call, self, outcome)

    def _note(self, call: Call, index: int | None, taken: float, now: float, outcome: Outcome) -> None:
        """Learn from the end of an attempt, or from its being taken back."""
        ok = True if outcome.verdict is _SUCCESS else self._judge(outcome)
        first_token = call.first_content
        if first_token is None and (ok or call.superseded):
            first_token = now - call.started  # one that was overtaken has taken at least as long
        self.load.finished(now, call.tokens or 0.0, ok=ok, first_token=first_token)
        if index is not None and self.credentials is not None:
            if ok:
                self.credentials.release(index, taken=taken, ok=True)
            else:
                self._give_back(self.credentials, index, taken, now, outcome)
        if call.sent is False:
            return
        self.attempts += 1
        if ok:
            self._succeeded(call, now)
        else:
            if ok is False or outcome.dead_credential:
                self.failures += 1
            if ok is False and self._reopens_in(call) > 0:
                self._out[self] = None  # nobody may ask meanwhile, and notice: others may be preferred
            self._learn(outcome, index, now)
        price = self.target.price_for(call.model) if self._is_priced else None
        if price is not None:
            owner = call.parent or call
            owner.cost += attempt_cost(call, price, outcome, self._estimate)

    def _succeeded(self, call: Call, now: float) -> None:
        self.cooling.on_trial = False
        self._stored.keep(call, self.target.name, now)
        self.durations.add(now - call.started)
        # Not by an answer to what was asked before its circuit opened.
        if self._out and self in self._out and self._reopens_in(call) <= 0:
            del self._out[self]
            self.load.came_back(now)

    def _judge(self, outcome: Outcome) -> bool | None:
        """Tell whether an attempt without success speaks against the target; `None` when it says nothing."""
        if outcome.verdict is Verdict.FAILURE:
            return False
        # A key that is refused at once must not make its target look idle and quick.
        return False if outcome.dead_credential and self.credentials is None else None

    def _give_back(
        self, pool: CredentialPool, index: int, taken: float, now: float, outcome: Outcome
    ) -> None:
        if outcome.dead_credential:
            pool.set_aside(index, now, outcome.retry_after, taken=taken)
        answered = outcome.status is not None and not outcome.dead_credential
        pool.release(index, taken=taken, ok=answered or None)

    def _learn(self, outcome: Outcome, index: int | None, now: float) -> None:
        """Cool down where the provider says so; of several credentials only the one that was throttled rests."""
        wanted = self.cooling.wanted(outcome)
        seconds = min(wanted, LONGEST_HINT)
        pool = self.credentials
        if seconds and outcome.verdict is Verdict.THROTTLED and index is not None and pool is not None:
            pool.rest(index, now, seconds)
            seconds = pool.resting(now)
        self.cooling.begin(now, seconds, on_trial=wanted > LONGEST_HINT)
