"""The buckets of a store that a call draws on: what they are called there, and what is known of them here.

What is taken of them, and when, must not enter here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from resilient_llm.core.quota import Quota, Reservation
from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLevel
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.policies._quotas import QuotaSet
from resilient_llm.shared_keys import shared_key

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["BucketView", "SharedBuckets", "SharedTake", "ViewReservation"]

_LATE = 60.0
"""Seconds by which no answer comes late: what is older still comes of a store's clock that was put right."""


class BucketView(TokenBucket):
    """What is known of a bucket in the store: `level` is what it said last, refilled since.

    `pending` is what was taken of the view and the store does not know of yet.
    """

    __slots__ = ("_as_of", "heard_at", "pending")

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        super().__init__(capacity, rate, now)
        self.pending = 0.0
        self.heard_at = now
        self._as_of = -math.inf

    def hear(self, level: RateLevel, now: float, *, answered: float = 0.0) -> None:
        """Take over what the store says, unless something newer was heard meanwhile.

        It may be the answer to a request that was on its way until now, for the amount `answered`.
        """
        if self._as_of - _LATE < level.at < self._as_of:
            # What was newer knew of it already, and it was taken off once more as long as it was on its way.
            self._set(min(self.capacity, self.level(now) + answered), now)
            return
        self._as_of = level.at
        self._set(level.level - self.pending, now)
        self._paused_until = now + level.pause
        self.heard_at = now

    def pause_left(self, now: float) -> float:
        """Say for how many seconds it gives nothing out, whatever there is."""
        return max(0.0, self._paused_until - now)

    def forget(self) -> None:
        """Know nothing: as far as anybody can tell, it is full."""
        self._set(self.capacity, self._updated)

    def rescale(self, ratio: float, now: float) -> None:
        """Make it that much smaller or larger, and slower or faster."""
        self._set(self.level(now) * ratio, now)
        self.capacity *= ratio
        self.rate *= ratio


class ViewReservation(Reservation):
    """Take of views what the store is asked for next: until it has answered, it is missing from whatever that says."""

    __slots__ = ("_pending",)

    def __init__(
        self,
        charges: Sequence[tuple[TokenBucket, float]],
        own: int = 0,
        quotas: Sequence[Quota] = (),
        marked: Sequence[int] = (),
    ) -> None:
        super().__init__(charges, own, quotas, marked)
        self._pending = False

    def answered(self) -> None:
        """Note that the store has answered, or is not to be asked."""
        if self._pending:
            self._pending = False
            self._add_pending(-1.0)

    def cancel(self, now: float) -> None:
        """Give everything back: what it was for was never done."""
        self.answered()
        super().cancel(now)

    def _open(self, now: float) -> None:
        super()._open(now)
        self._pending = True
        self._add_pending(1.0)

    def _add_pending(self, sign: float) -> None:
        for view, amount in self.charges:
            cast("BucketView", view).pending += sign * amount


@dataclass(slots=True, eq=False)
class SharedTake:
    """What one call takes of the store's buckets, in the order of its reservation's charges."""

    account: str
    charges: list[RateCharge]
    views: Sequence[BucketView]
    counted: bool = True
    """Whether the store knows, or will hear, that it was taken."""

    def exceeds(self, *, borrow: bool) -> bool:
        """Tell whether it can never be taken, also with what a bucket lends, if they are to `borrow`."""
        for each in self.charges:
            lends = max(each.capacity, 60.0 * each.rate) if borrow else 0.0
            if each.amount > each.capacity + lends:
                return True
        return False

    def of_the_whole(self, now: float) -> Reservation:
        """Give the same of buckets that are as large as in the store, whatever share of them there is here."""
        return Reservation(
            [(TokenBucket(each.capacity, each.rate, now), each.amount) for each in self.charges]
        )

    def changes(self, used: Sequence[float]) -> tuple[list[BucketView], list[Change]]:
        """Say what of it is to be settled, now that so much was used, and in which views."""
        views: list[BucketView] = []
        changes: list[Change] = []
        for view, charge, actual in zip(self.views, self.charges, used, strict=True):
            if actual != charge.amount:
                views.append(view)
                changes.append(Change(charge.key, charge.capacity, charge.rate, charge.amount - actual))
        return views, changes

    def keep(self, decision: RateDecision) -> None:
        """Note what is held of each bucket until it comes back."""
        self.charges = [
            charge._replace(held=held, turn=decision.turn(index))
            for index, (charge, held) in enumerate(zip(self.charges, decision.held, strict=True))
        ]

    def give_up(self) -> tuple[list[BucketView], list[Change]]:
        """Say of which places to tell the store that they are given up, and in which views; they are held no longer."""
        views: list[BucketView] = []
        changes: list[Change] = []
        for view, charge in zip(self.views, self.charges, strict=True):
            if charge.held:
                views.append(view)
                changes.append(Change(*charge[:3], freed=charge.held, turn=charge.turn))
        self.charges = [charge._replace(held=0.0) for charge in self.charges]
        return views, changes

    def lowered(
        self, before: Sequence[float], now: float
    ) -> tuple[list[BucketView], list[RateCharge], list[float]]:
        """Say which views are lower than `before`, or paused: to what level, and for how many seconds."""
        views: list[BucketView] = []
        charges: list[RateCharge] = []
        pauses: list[float] = []
        for view, charge, level in zip(self.views, self.charges, before, strict=True):
            lowered, pause = view.level(now), view.pause_left(now)
            if lowered < level or pause:
                views.append(view)
                # The view takes off what is on its way; the store will, when it arrives.
                charges.append(charge._replace(amount=lowered + view.pending))
                pauses.append(pause)
        return views, charges, pauses


class SharedBuckets:
    """Name the buckets of a policy's quotas, `name` being the policy's, and keep the views of them in size."""

    def __init__(self, name: str, quotas: QuotaSet) -> None:
        self.divided_by = 1
        """Of how many processes the views are the share of one."""
        self._quotas = quotas
        self._account = shared_key(name)
        # One limit's keys have nothing to be taken together with: each may be on another server of a cluster.
        self._alone = len(quotas._all) == 1
        self._scopes = [
            [
                (f"{shared_key(each.limit.name)}:{dimension}:", *each.limit.buckets()[dimension])
                for dimension in each.dimensions
            ]
            for each in quotas._all
        ]

    def take(self, call: Call, reservation: Reservation) -> SharedTake:
        """Say what a call needs of which bucket."""
        charges: list[RateCharge] = []
        # The quotas were told to make views.
        views = [cast("BucketView", bucket) for bucket, _ in reservation.charges]
        key, at, account = "", 0, self._account
        for quotas, scopes in zip(self._quotas._all, self._scopes, strict=True):
            key = shared_key(quotas.key(call))
            for prefix, capacity, rate in scopes:
                view, amount = views[at], reservation.charges[at][1]
                if quotas.overflows(reservation.quotas, view):
                    view.forget()  # it is of many keys, and says nothing of this one
                charges.append(RateCharge(prefix + key, capacity, rate, amount, at < reservation.own))
                at += 1
        if self._alone:
            account = f"{account}:{key}"
        return SharedTake(account, charges, views)

    def divide_by(self, processes: int, now: float) -> None:
        """Make the views the share of one of so many processes."""
        if processes == self.divided_by:
            return
        ratio = self.divided_by / processes
        self.divided_by = processes
        for quotas in self._quotas._all:
            quotas.rescale(ratio)
            for quota in quotas:
                for view in quota.buckets:
                    cast("BucketView", view).rescale(ratio, now)

    def forget(self) -> None:
        """Start afresh, with views of the whole."""
        self.divided_by = 1
