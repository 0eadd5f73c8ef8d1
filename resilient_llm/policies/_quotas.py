"""The quotas of every limit by key: a tenant's, a model's, the account's, and what a call draws on.

Keeps the state bounded, whatever keys callers invent. When something is taken, and who waits for it, must not enter
here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from resilient_llm.core.quota import LimitLevel, Quota, Reservation
from resilient_llm.core.rate_queue import Delay
from resilient_llm.core.sweep import FEW, MANY, Sweep
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.errors import ConfigurationError, CostExceedsCapacityError, RateLimitedError
from resilient_llm.policies._keyed import key_function
from resilient_llm.policies.limit import Dimension, Limit
from resilient_llm.shared_keys import OVERFLOW
from resilient_llm.telemetry.names import LIMITER_NAME

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.core.rate_feedback import Mirrored

__all__ = ["QuotaSet", "Quotas"]

_MAX_REPORTED = 10_000  # keys that a gauge looks at


class Quotas:
    """Keep one quota per key of a limit, at most `max_keys` of them.

    A quota that is full and from which nothing is outstanding is as good as none, and is forgotten: a few are looked
    at with every call. While `max_keys` are in use, further keys share one overflow quota, and the call's span gets
    an event that says so.
    """

    __slots__ = (
        "_bucket",
        "_buckets",
        "_function",
        "_max_keys",
        "_name",
        "_quotas",
        "_sweep",
        "count_tokens",
        "dimensions",
        "limit",
    )

    def __init__(
        self,
        limit: Limit,
        *,
        max_keys: int,
        name: str,
        bucket: type[TokenBucket] = TokenBucket,
        in_store: bool = False,
    ) -> None:
        self.limit = limit
        buckets = limit.buckets()
        self.dimensions = tuple(buckets)
        self.count_tokens = tuple(dimension == "tokens" for dimension in buckets)
        self._bucket = bucket
        self._buckets = tuple(buckets.values())
        self._function = None if limit.key is None else key_function(limit.key, in_store=in_store)
        self._max_keys = max_keys
        self._name = name
        self._quotas: dict[Hashable, Quota] = {}
        self._sweep = Sweep(self._quotas, Quota.idle)

    def of(self, call: Call, now: float) -> Quota:
        """Give the quota for a call, made when there is none."""
        key = None if self._function is None else self._function(call)
        quota = self._quotas.get(key)
        if len(self._quotas) > FEW:
            self._sweep.look(1, now, key)
        return self._new(key, call, now) if quota is None else quota

    def peek(self, call: Call, now: float) -> Quota:
        """Give the quota for a call, or one like it that is not kept when there is none."""
        quota = self._quotas.get(None if self._function is None else self._function(call))
        if quota is None and len(self._quotas) >= self._max_keys:
            quota = self._quotas.get(OVERFLOW)
        return self._make(now) if quota is None else quota

    def lowest(self, now: float) -> Iterator[tuple[Dimension, float]]:
        """Say what remains of each bucket, of the key that has least."""
        quotas = list(islice(list(self._quotas.values()), _MAX_REPORTED))
        for index, (dimension, (capacity, _)) in enumerate(zip(self.dimensions, self._buckets, strict=True)):
            yield dimension, min((quota.buckets[index].level(now) for quota in quotas), default=capacity)

    def key(self, call: Call) -> Hashable:
        """Give the key of a call."""
        return None if self._function is None else self._function(call)

    def overflows(self, found: Sequence[Quota], bucket: TokenBucket) -> bool:
        """Tell whether a bucket, of one of the quotas `found`, is that of all keys for which there is no room."""
        quota = self._quotas.get(OVERFLOW)
        return quota is not None and quota in found and bucket in quota.buckets

    def rescale(self, ratio: float) -> None:
        """Make the buckets to come that much smaller and slower, or larger and faster."""
        self._buckets = tuple((capacity * ratio, rate * ratio) for capacity, rate in self._buckets)

    def __iter__(self) -> Iterator[Quota]:
        return iter(list(self._quotas.values()))

    def clear(self) -> None:
        """Forget everything."""
        self._quotas.clear()
        self._sweep.clear()

    def __len__(self) -> int:
        return len(self._quotas)

    def _make(self, now: float) -> Quota:
        return Quota([self._bucket(capacity, rate, now) for capacity, rate in self._buckets])

    def _new(self, key: Hashable, call: Call, now: float) -> Quota:
        if len(self._quotas) >= self._max_keys:
            self._sweep.look(MANY, now, key)
        if len(self._quotas) >= self._max_keys:
            call.telemetry.event(call, "keys_overflow", {LIMITER_NAME: self._name})
            key = OVERFLOW
            if key in self._quotas:
                return self._quotas[key]
        quota = self._quotas[key] = self._make(now)
        return quota


class QuotaSet:
    """Keep the quotas of several limits that are taken together."""

    __slots__ = (
        "_all",
        "_labels",
        "_lane",
        "_marked",
        "_own",
        "_reservation",
        "_tokens",
        "counts_tokens",
        "mirrored",
    )

    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        max_keys: int,
        name: str,
        bucket: type[TokenBucket] = TokenBucket,
        reservation: type[Reservation] = Reservation,
        in_store: bool = False,
    ) -> None:
        self._reservation = reservation
        names = [limit.name for limit in limits]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"limits={names!r}: each needs a scope= of its own to be told apart")
        ordered = sorted(limits, key=lambda limit: not limit.own)
        self._all = tuple(
            Quotas(limit, max_keys=max_keys, name=name, bucket=bucket, in_store=in_store) for limit in ordered
        )
        shared = [limit.shared_key(in_store=in_store) for limit in ordered]
        self._lane = tuple(function for function in shared if function is not None)
        self._labels = [(q.limit.name, dimension) for q in self._all for dimension in q.dimensions]
        self._own = sum(len(limit.buckets()) for limit in ordered if limit.own)
        by_key = any(limit.mirrors for limit in limits)
        mirrored: dict[str, list[int]] = {}
        self._tokens: list[bool] = []
        for quotas in self._all:
            limit = quotas.limit
            learns = (
                limit.mirrors or (limit.key is None and not by_key) if limit.learn is None else limit.learn
            )
            for dimension in quotas.dimensions:
                if learns:
                    counted = "tokens" if dimension == "tokens" else "requests"
                    mirrored.setdefault(counted, []).append(len(self._tokens))
                self._tokens.append(dimension == "tokens")
        self.mirrored: Mirrored = mirrored
        self._marked = tuple(index for charges in mirrored.values() for index in charges)
        self.counts_tokens = any(self._tokens)
        """Whether any limit is one on tokens."""

    def reserve(self, call: Call, now: float, requests: float, tokens: float) -> Reservation:
        """Say what a call takes, of which bucket of every limit; nothing is taken yet."""
        found: list[Quota] = []
        charges: list[tuple[TokenBucket, float]] = []
        for quotas in self._all:
            quota = quotas.of(call, now)
            found.append(quota)
            for bucket, counts_tokens in zip(quota.buckets, quotas.count_tokens):  # noqa: B905 - strict= is slow
                charges.append((bucket, tokens if counts_tokens else requests))
        # By position: a class called with names is given a dict of them, which costs as much again.
        return self._reservation(charges, self._own, found, self._marked)

    def settle(self, reservation: Reservation, tokens: float, now: float) -> None:
        """Replace the estimate in a reservation by the tokens that were used."""
        reservation.settle(self.used(reservation, tokens), now)

    def used(self, reservation: Reservation, tokens: float) -> list[float]:
        """Say what was used of each charge when that many tokens were."""
        return [
            tokens if counts else amount
            for (_, amount), counts in zip(reservation.charges, self._tokens, strict=True)
        ]

    def share(self, reservation: Reservation) -> float:
        """Say what a call counts for among tenants: its tokens where they are limited, else its requests."""
        charges = zip(reservation.charges, self._tokens, strict=True)
        tokens = max((amount for (_, amount), counts in charges if counts), default=0.0)
        return tokens or max((amount for _, amount in reservation.charges if amount > 0), default=1.0)

    def lane(self, call: Call) -> Hashable:
        """Give what calls have in common that draw on the same shared buckets."""
        return tuple(function(call) for function in self._lane)

    def _levels(self, buckets: Iterable[TokenBucket], now: float) -> tuple[LimitLevel, ...]:
        return tuple(
            LimitLevel(
                scope=scope,
                dimension=dimension,
                limit=bucket.capacity,
                remaining=bucket.level(now),
                reset=bucket.reset(now),
                window=bucket.capacity / bucket.rate,
            )
            for (scope, dimension), bucket in zip(self._labels, buckets, strict=True)
        )

    def peek(self, call: Call, now: float) -> tuple[LimitLevel, ...]:
        """Say where the limits of a call stand, which draws on them no more for that; no quota is made."""
        return self._levels(
            (bucket for quotas in self._all for bucket in quotas.peek(call, now).buckets), now
        )

    def oversized(
        self, reservation: Reservation, now: float, *, borrow: bool, name: str
    ) -> CostExceedsCapacityError | None:
        """Say why a call can never pass, not even by what is lent with `borrow`; `None` when it can."""
        index = reservation.oversized(borrow=borrow)
        if index is None:
            return None
        level, (bucket, cost) = self._levels_of(reservation, now)[index], reservation.charges[index]
        lends = f" and lends {bucket.lends:g}" if borrow else ""
        return CostExceedsCapacityError(
            f"{name}: a call that needs {cost:g} {level.name} can never pass: "
            f"the limit holds {level.limit:g}{lends}",
            level=level,
            cost=cost,
            name=name,
        )

    def refusal(
        self, reservation: Reservation, delay: Delay, now: float, *, why: str, name: str
    ) -> RateLimitedError:
        """Say what a call needs that is not there, and `why` it does not wait for it."""
        levels = self._levels_of(reservation, now)
        level, cost = levels[delay.charge], reservation.charges[delay.charge][1]
        return RateLimitedError(
            f"{name}: {level.remaining:g} of {level.limit:g} {level.name} remain, {cost:g} are needed; {why}",
            level=level,
            levels=levels,
            retry_after=delay.seconds,
            name=name,
        )

    def _levels_of(self, reservation: Reservation, now: float) -> tuple[LimitLevel, ...]:
        return self._levels((bucket for bucket, _ in reservation.charges), now)

    def lowest(self, now: float) -> Iterator[tuple[str, Dimension, float]]:
        """Say of every limit what remains for the key that has least of it."""
        for quotas in self._all:
            for dimension, remaining in quotas.lowest(now):
                yield quotas.limit.name, dimension, remaining

    def clear(self) -> None:
        """Forget everything."""
        for quotas in self._all:
            quotas.clear()

    def __len__(self) -> int:
        return sum(len(quotas) for quotas in self._all)
