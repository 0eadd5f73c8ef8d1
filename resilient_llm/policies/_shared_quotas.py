"""Rate limits that are kept in a store: who asks it, who waits here, and who is refused without asking.

The store decides; what this process knows of it, `_shared_view` keeps. How a store is reached, and how those who wait
are told, must not enter here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import anyio

from resilient_llm.core.rate_queue import Delay
from resilient_llm.core.shared_rate import RateDecision, Verdict
from resilient_llm.errors import ConfigurationError, CostExceedsCapacityError, StoreUnavailableError
from resilient_llm.policies._quotas import QuotaSet
from resilient_llm.policies._shared_buckets import SharedTake, ViewReservation
from resilient_llm.policies._shared_view import SharedView
from resilient_llm.policies._store_events import tell_store
from resilient_llm.policies._store_names import claim
from resilient_llm.telemetry.names import DRY_RUN, LIMITER_NAME, WAIT_TIME

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.policies._rate_waiters import RateWaiters
    from resilient_llm.policies.limit import Limit
    from resilient_llm.stores.protocol import RateStore
    from resilient_llm.telemetry import WaitOutcome

__all__ = ["SharedQuotas"]

_FRESH = 1.0
"""Seconds for which what was heard is good enough to refuse a call by: others may give back meanwhile.

And for which who came back for its place in vain heeds no news: what is known here need not be so.
"""
_LOOKS = 8
"""How often in one wait the store is asked what others have given back; never twice within `_FRESH` seconds."""
_SLACK = 0.01
"""Seconds by which those who kept a place may come back late and still get what they waited for."""


class SharedQuotas:
    """Take what calls need from a store, in turn, and keep the view of it.

    A call that would pass by the view asks the store, once. Where that refuses, it keeps a place in line there, one
    call of a tenant at a time in each lane, comes back when it is its turn, and runs; the others wait in the waiting
    room by the view, which counts the places kept by all processes. Nobody waits by the view alone: others may have
    given back what it knows nothing of. What exceeds the wait allowed is refused, by the view while that is fresh.
    """

    def __init__(
        self,
        store: RateStore,
        quotas: QuotaSet,
        waiters: RateWaiters,
        limits: Sequence[Limit],
        *,
        name: str,
        borrow: bool,
        dry_run: bool,
    ) -> None:
        if not claim(store, "rates", name, tuple(limits)):
            raise ConfigurationError(
                f"name={name!r}: another RateLimit with other limits keeps its counts in the same store by this name; "
                "give each a name= of its own"
            )
        self.guard = store.guard
        self.view = SharedView(store, quotas, waiters, name=name)
        self._quotas = quotas
        self._waiters = waiters
        self._name = name
        self._borrow = borrow
        self._dry_run = dry_run

    def forget(self) -> None:
        """Start afresh in another event loop."""
        self.view.forget()

    async def take(self, call: Call, reservation: ViewReservation, now: float) -> SharedTake | None:
        """Take what a call needs, when it is its turn; `None` when a dry run would have refused it.

        Raises `RateLimitedError`, `CostExceedsCapacityError`, `DeadlineExceededError`, and with
        `on_store_error="closed"` `StoreUnavailableError`.
        """
        tell_store(call, self.guard)
        take = self.view.take(call, reservation)
        if oversized := self._oversized(take, now):
            call.telemetry.rejected(call, oversized, dry_run=self._dry_run)
            if self._dry_run:
                return None
            raise oversized
        try:
            if self._dry_run:
                return await self._rehearse(call, take, reservation, now)
            if not self.guard.closed and (wait := self.guard.retry_after()):
                error = self.guard.error(f"not asked for another {wait:.3g} s, since it failed")
                return await self._take_alone(call, take, reservation, now, error)
            waited = False
            self._waiters.catch_up(now)
            if len(self._waiters.queue) or not reservation.take_at_once(now):
                if self._is_worth_asking(call, take, reservation, now):
                    reservation.take(now)
                elif not await self._wait(call, reservation, now, since=now):
                    return await self._take_alone(call, take, reservation, now, self.guard.ended_error())
                else:
                    waited = True
            return await self._take(call, take, reservation, now, waited=waited)
        finally:
            tell_store(call, self.guard)

    def _oversized(self, take: SharedTake, now: float) -> CostExceedsCapacityError | None:
        """Say why a call can never pass: by the limits as they are, whatever share of them there is just now."""
        if not take.exceeds(borrow=self._borrow):
            return None
        return self._quotas.oversized(take.of_the_whole(now), now, borrow=self._borrow, name=self._name)

    def _is_worth_asking(
        self, call: Call, take: SharedTake, reservation: ViewReservation, now: float
    ) -> bool:
        """Tell whether to ask for a call that cannot pass by the view: it may be out of date, and keeps no place."""
        if len(self._waiters.queue):
            return False
        delay = self._waiters.delay(call, reservation, now)
        too_long = now + delay.seconds > self._waiters.deadline(call, now)
        if too_long or not self._waiters.has_room(call.tenant, now):
            return now - take.views[delay.charge].heard_at > _FRESH
        return self._place(call) not in self.view.places

    def _place(self, call: Call) -> Hashable:
        return self._quotas.lane(call), call.tenant

    async def _take(
        self, call: Call, take: SharedTake, reservation: ViewReservation, arrived: float, *, waited: bool
    ) -> SharedTake:
        """Ask the store for what was taken of the view, and again when it is its turn.

        Who has `waited` goes on waiting; who has not needs one of the places that there are for that.
        """
        place, waiters = self._place(call), self._waiters
        deadline = waiters.deadline(call, arrived)
        keeps = slept = False
        try:
            while True:
                now = call.loop.time()
                if not keeps and (waited or waiters.has_room(call.tenant, now)):
                    keeps = self.view.places.keep(place)
                try:
                    decision = await self.view.ask(
                        call,
                        take,
                        reservation,
                        most_wait=max(0.0, deadline - now) + _SLACK,
                        mode="h" if keeps else "n",
                    )
                except StoreUnavailableError as error:
                    return await self._take_alone(call, take, reservation, arrived, error, again=waited)
                if decision.verdict is Verdict.TAKEN:
                    return take
                reservation.keep()
                now = call.loop.time()
                # A place that is kept is used: it was, for a wait that is allowed, however long the answer took.
                if decision.verdict is Verdict.REFUSED and (keeps or decision.wait > deadline - now + _SLACK):
                    delay = Delay(decision.wait, decision.limiting)
                    raise waiters.refuse(call, reservation, now, delay, since=arrived)
                if decision.verdict is Verdict.HELD:
                    take.keep(decision)
                    if not waited and not waiters.has_room(call.tenant, now):
                        self.view.give_up(call, take, reservation)
                        delay = Delay(decision.wait, decision.limiting)
                        raise waiters.no_place(call, reservation, now, delay=delay)
                    await self._sleep(call, take, reservation, decision, in_vain=slept)
                    waited = slept = True
                    reservation.take(call.loop.time())
                elif not await self._wait(call, reservation, now, since=arrived, again=waited):
                    ended = self.guard.ended_error()
                    return await self._take_alone(call, take, reservation, arrived, ended, again=waited)
                else:
                    waited = True
        finally:
            if keeps:
                self.view.places.leave(place)

    async def _wait(
        self, call: Call, reservation: ViewReservation, now: float, *, since: float, again: bool = False
    ) -> bool:
        """Wait in the process's line, and take what is needed of the view; `False` when the store is closed before."""
        with anyio.CancelScope() as scope, self.guard.until_ended(scope.cancel):
            await self._waiters.take(call, reservation, now, since=since, again=again)
        return not scope.cancelled_caught

    async def _sleep(
        self,
        call: Call,
        take: SharedTake,
        reservation: ViewReservation,
        decision: RateDecision,
        *,
        in_vain: bool,
    ) -> None:
        """Wait for its turn, which is exact; cancelled, or when the store is closed, it gives its place up."""
        since, depth = call.loop.time(), self._waiters.queued + 1  # as if it stood in the queue
        outcome: WaitOutcome = "cancelled"
        scope = anyio.CancelScope()

        def give_up() -> None:
            self.view.give_up(call, take, reservation)
            scope.cancel()

        try:
            with (
                self._waiters.away(call.tenant, since + decision.again),
                scope,
                self.guard.until_ended(give_up),
            ):
                await self._until_turn(call, take, reservation, decision, in_vain=in_vain)
            outcome = "acquired"
        except BaseException:
            if not scope.cancel_called:
                give_up()
            raise
        finally:
            unit = "tokens" if self._quotas.counts_tokens else "requests"
            call.telemetry.waited(call, self._name, since=since, outcome=outcome, unit=unit, depth=depth)

    async def _until_turn(
        self,
        call: Call,
        take: SharedTake,
        reservation: ViewReservation,
        decision: RateDecision,
        *,
        in_vain: bool,
    ) -> None:
        """Sleep until its turn, or until there is enough before; look now and then what others have given back.

        Who has come back `in_vain` does so again at its turn, or by news that are heeded only after a while: each such
        ask is news to the others, and none of them may have enough.
        """
        places, turn = self.view.places, call.loop.time() + decision.again
        interval = max(_FRESH, decision.again / _LOOKS)
        with places.line_up(take.views, decision.held) as enough:
            if in_vain:
                await anyio.sleep(min(_FRESH, decision.again))
            places.rise(take.views, call.loop.time())  # what is known may be newer than the decision
            while not enough.is_set() and (left := turn - call.loop.time()) > 0:
                with anyio.move_on_after(left if left < 2 * interval else interval):
                    await enough.wait()
                if not enough.is_set() and call.loop.time() < turn:
                    await self.view.look(call, take, reservation)

    async def _rehearse(
        self, call: Call, take: SharedTake, reservation: ViewReservation, now: float
    ) -> SharedTake | None:
        """Do for a dry run as if the call waited: a debt stands for the queue."""
        reservation.take(now)
        waiters = self._waiters
        try:
            most_wait = waiters.deadline(call, now) - now
            decision = await self.view.ask(call, take, reservation, most_wait=most_wait, mode="d")
        except StoreUnavailableError:
            self.guard.unguarded += 1
            reservation.take(call.loop.time())
            reservation.answered()
            take.counted = False
            return take
        answered = call.loop.time()
        if decision.verdict is not Verdict.TAKEN:
            reservation.keep()
            delay = Delay(decision.wait, decision.limiting)
            waiters.refuse(call, reservation, answered, delay, since=now, dry_run=True)
            return None
        if decision.wait:
            if not waiters.would_wait(call, answered, decision.wait):
                reservation.cancel(answered)
                self.view.settle(call, take, reservation, None)
                waiters.no_place(call, reservation, answered, dry_run=True)
                return None
            would: dict[str, str | float] = {
                LIMITER_NAME: self._name,
                WAIT_TIME: decision.wait,
                DRY_RUN: True,
            }
            call.telemetry.event(call, "would_wait", would)
        return take

    async def _take_alone(
        self,
        call: Call,
        take: SharedTake,
        reservation: ViewReservation,
        arrived: float,
        error: StoreUnavailableError,
        *,
        again: bool = False,
    ) -> SharedTake:
        """Decide without the store, as it was told to: refuse, let through, or give of this process's share."""
        self.guard.unguarded += 1
        now = call.loop.time()
        if self.guard.on_error == "closed":
            call.telemetry.rejected(call, error)
            raise error
        if self.guard.on_error == "open":
            reservation.hold()
            take.charges = [charge._replace(amount=0.0) for charge in take.charges]
            take.counted = False
            return take
        self.view.share_out(now)
        if len(self._waiters.queue) or not reservation.take_at_once(now):
            await self._waiters.take(call, reservation, now, since=arrived, again=again)
        reservation.answered()
        self.view.charge(take)
        return take
