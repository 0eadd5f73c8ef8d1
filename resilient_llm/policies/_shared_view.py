"""What a process tells a store of rate limits and asks of it, and what it hears: the view that it goes by meanwhile.

The buckets here stand as the store said last, and refill since; while there is no answer they are this process's share.
Who may pass, and in what order, must not enter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from resilient_llm.core.quota import Reservation
from resilient_llm.core.shared_rate import Change, RateDecision, RateLevel, TakeMode
from resilient_llm.errors import StoreUnavailableError
from resilient_llm.policies._places import Places
from resilient_llm.policies._quotas import QuotaSet
from resilient_llm.policies._shared_buckets import BucketView, SharedBuckets, SharedTake, ViewReservation

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.policies._rate_waiters import RateWaiters
    from resilient_llm.stores.protocol import RateStore

__all__ = ["SharedView"]


class SharedView:
    """Ask a store and tell it things, keep what it says, and let those go on who can by that."""

    def __init__(self, store: RateStore, quotas: QuotaSet, waiters: RateWaiters, *, name: str) -> None:
        self.places = Places()
        self._store = store
        self._rates = store.rates
        self._quotas = quotas
        self._waiters = waiters
        self._buckets = SharedBuckets(name, quotas)

    def forget(self) -> None:
        """Start afresh in another event loop."""
        self.places.forget()
        self._buckets.forget()

    def take(self, call: Call, reservation: Reservation) -> SharedTake:
        """Say what a call needs of the store's buckets."""
        return self._buckets.take(call, reservation)

    async def ask(
        self, call: Call, take: SharedTake, reservation: ViewReservation, *, most_wait: float, mode: TakeMode
    ) -> RateDecision:
        """Ask the store for what was taken of the view, which is given back if nothing comes of it."""
        decision = None
        since = call.loop.time()
        try:
            decision = await self._rates.take(
                take.account,
                take.charges,
                most_wait=most_wait,
                mode=mode,
                undone=partial(self._hear_later, call, reservation, take.views),
            )
        finally:
            reservation.answered()
            if decision is None:
                reservation.cancel(call.loop.time())
                self._wake(call, reservation, take.views)
            call.telemetry.step(call, "store", since=since)
        self._restore(call)
        answered = [charge.amount for charge in take.charges]
        self._hear(call, reservation, take.views, decision.levels, answered)
        return decision

    async def look(self, call: Call, take: SharedTake, reservation: Reservation) -> None:
        """Hear where a call's buckets stand, if the store says so; nothing is taken."""
        nothing = [charge._replace(amount=0.0, held=0.0) for charge in take.charges]
        try:
            decision = await self._rates.take(take.account, nothing)
        except StoreUnavailableError:
            return
        self._hear_later(call, reservation, take.views, decision.levels)

    def give_up(self, call: Call, take: SharedTake, reservation: Reservation) -> None:
        """Tell the store that nobody comes back for what it held."""
        views, freed = take.give_up()
        if freed:
            self._rates.settle(take.account, freed, partial(self._hear_later, call, reservation, views))

    def settle(self, call: Call, take: SharedTake, reservation: Reservation, tokens: float | None) -> None:
        """Tell the store how many tokens a call really used, or with `None` that nothing was; the view knows."""
        if not take.counted:
            return
        used = [0.0] * len(take.charges) if tokens is None else self._quotas.used(reservation, tokens)
        views, changes = take.changes(used)
        if changes:
            self._rates.settle(take.account, changes, partial(self._hear_later, call, reservation, views))

    def lower(self, call: Call, take: SharedTake, reservation: Reservation, before: Sequence[float]) -> None:
        """Tell the store what the view has learned from a provider, since its levels were those `before`."""
        if not self._store.guard.closed:
            return  # the view is a share of the whole
        views, charges, pauses = take.lowered(before, call.loop.time())
        if charges:
            self._rates.lower(
                take.account, charges, pauses, partial(self._hear_later, call, reservation, views)
            )

    def share_out(self, now: float) -> None:
        """Make the view this process's share of the whole."""
        self._buckets.divide_by(max(1, self._store.processes), now)

    def charge(self, take: SharedTake) -> None:
        """Tell the store, once it is back, what was taken without it."""
        charged = [Change(c.key, c.capacity, c.rate, -c.amount) for c in take.charges if c.amount]
        self._rates.settle(take.account, charged)

    def _restore(self, call: Call) -> None:
        """Make the view one of the whole again, now that the store has answered."""
        if self._buckets.divided_by > 1:
            now = call.loop.time()
            self._buckets.divide_by(1, now)
            self._waiters.give_back(call.tenant, now)

    def _hear(
        self,
        call: Call,
        reservation: Reservation,
        views: Sequence[BucketView],
        levels: Sequence[RateLevel],
        answered: Sequence[float],
    ) -> None:
        """Hear where buckets stand."""
        now = call.loop.time()
        for view, level, amount in zip(views, levels, answered, strict=True):
            view.hear(level, now, answered=amount)
        self._wake(call, reservation, views)

    def _wake(self, call: Call, reservation: Reservation, views: Sequence[BucketView]) -> None:
        """Let those go on who can, now that the views may have risen."""
        now = call.loop.time()
        self.places.rise(views, now)
        self._waiters.give_back(call.tenant, now, reservation)

    def _hear_later(
        self,
        call: Call,
        reservation: Reservation,
        views: Sequence[BucketView],
        levels: Sequence[RateLevel],
    ) -> None:
        """Hear where buckets stand after something that was not asked for a call, or for one that has gone."""
        self._restore(call)
        self._hear(call, reservation, views, levels, [0.0] * len(views))
