"""Requests and tokens per minute, of a tenant, a model and an account, as one decision."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from resilient_llm._loop import LoopBound
from resilient_llm._options import (
    at_least,
    flag,
    function,
    instance_of,
    label,
    one_of,
    seconds,
    store_of,
)
from resilient_llm.core.quota import LimitLevel, Reservation
from resilient_llm.core.rate_feedback import learn, learn_refusal
from resilient_llm.core.ratelimit_headers import rate_limit_levels
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import (
    AttemptError,
    ConfigurationError,
    CostExceedsCapacityError,
)
from resilient_llm.ordering import Door, Placement
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.policies._keyed import Key
from resilient_llm.policies._quotas import QuotaSet
from resilient_llm.policies._rate_waiters import RateWaiters
from resilient_llm.policies._settlement import never_sent, tokens_used
from resilient_llm.policies._shared_buckets import BucketView, SharedTake, ViewReservation
from resilient_llm.policies._shared_quotas import SharedQuotas
from resilient_llm.policies._shares import weight_function
from resilient_llm.policies.limit import Limit
from resilient_llm.policies.tokens import Estimate, TokenEstimate, amount, estimate_once
from resilient_llm.telemetry.names import DRY_RUN, LIMIT_UNIT, LIMITER_NAME, WAIT_TIME

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Headers, Reply
    from resilient_llm.stores.protocol import RateStore
    from resilient_llm.telemetry import Telemetry

__all__ = ["RateLimit"]

_SUCCESS = Verdict.SUCCESS


@dataclass(frozen=True, kw_only=True, eq=False)
class RateLimit:
    """Let calls pass at no more than so many requests and tokens a minute.

    `RateLimit(requests_per_minute=..., tokens_per_minute=..., burst=...)` limits each `key`, by default each tenant,
    as one `Limit` with these options; `limits` are several, of which a call takes all it needs or nothing. A bucket
    holds `window` seconds' worth, and grants in any T seconds at most that and what T seconds refill, less what is
    given back. Counted in this process only; with a `store`, by `name` and for all processes that share it.

    A call reserves one request, or what `cost` says, and its `estimate` of tokens; once it is over, the usage that
    its reply reported replaces the estimate, and what was never sent is given back. The replies of a provider lower
    the levels of limits that mirror its own.

    When too little is left a call waits, for at most `max_wait` seconds and never past its deadline, in turn among
    tenants by estimated tokens and `weights`, inside a tenant by priority (`ageing` as in `WaitingRoom`), up to
    `max_queued` of one tenant and `max_queued_total` (10 times as many) of all. A wait that cannot fit is refused at
    once. What exceeds a bucket is refused for good, or with `oversize="borrow"` passes when the bucket is full and
    leaves a debt of at most a minute's worth, or one bucket where that is more; beyond that it is refused too. With
    `dry_run` everything is counted and reported, nothing waits and nothing is refused.

    Raises `RateLimitedError` and `CostExceedsCapacityError`, and `StoreUnavailableError` where a store that does not
    answer is to refuse calls.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    burst: float | None = None
    key: Key | None = "tenant"
    window: float = 60.0
    learn: bool | None = None
    limits: Sequence[Limit] = ()
    max_wait: float = 30.0
    max_queued: int = 1_000
    max_queued_total: int | None = None
    weights: Mapping[str, float] | Callable[[str | None], float] | None = None
    ageing: float = 10.0
    cost: Callable[[Call], float] | None = None
    estimate: Estimate = field(default_factory=TokenEstimate)
    oversize: Literal["refuse", "borrow"] = "refuse"
    max_keys: int = 10_000
    dry_run: bool = False
    store: RateStore | None = None
    name: str = "rate_limit"
    placement: ClassVar[Placement] = Placement.ADMISSION
    attempt_placement: ClassVar[Placement] = Placement.ATTEMPT_RATE
    _quotas: QuotaSet = field(init=False, repr=False)
    _waiters: RateWaiters = field(init=False, repr=False)
    _shared: SharedQuotas | None = field(init=False, repr=False)
    _loop: LoopBound = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flag(dry_run=self.dry_run)
        label(name=self.name)
        function(none=True, cost=self.cost)
        function(estimate=self.estimate)
        store_of("rates", "rate limits", self.store)
        at_least(1, max_keys=self.max_keys)
        at_least(0, max_queued=self.max_queued)
        if self.max_queued_total is not None:
            at_least(0, max_queued_total=self.max_queued_total)
        seconds(max_wait=self.max_wait, zero=True, infinite=True)
        seconds(ageing=self.ageing, zero=True)
        one_of(("refuse", "borrow"), oversize=self.oversize)
        limits = self._all_limits()
        quotas = QuotaSet(
            limits,
            max_keys=self.max_keys,
            name=self.name,
            bucket=TokenBucket if self.store is None else BucketView,
            reservation=Reservation if self.store is None else ViewReservation,
            in_store=self.store is not None,
        )
        try:
            self._make_room()
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        waiters = RateWaiters(
            quotas,
            self._make_room,
            max_queued=self.max_queued,
            max_queued_total=self._max_queued_total,
            max_wait=self.max_wait,
            name=self.name,
        )
        shared = None
        if self.store is not None:
            shared = SharedQuotas(
                self.store,
                quotas,
                waiters,
                limits,
                name=self.name,
                borrow=self.oversize == "borrow",
                dry_run=self.dry_run,
            )
        object.__setattr__(self, "_quotas", quotas)
        object.__setattr__(self, "_shared", shared)
        object.__setattr__(self, "_waiters", waiters)
        object.__setattr__(self, "_loop", LoopBound(self.name, self._forget))

    def _all_limits(self) -> Sequence[Limit]:
        limits = self.limits
        if isinstance(limits, str | bytes) or not isinstance(limits, Sequence):
            raise ConfigurationError(f"limits={limits!r}: allowed are lists of Limit objects")
        for index, limit in enumerate(limits):
            instance_of(Limit, none=False, **{f"limits[{index}]": limit})
        single = {option: getattr(self, option) for option in _OF_A_LIMIT}
        if not limits:
            return [Limit(**single)]
        if given := [f"{option}=" for option, value in single.items() if value != _OF_A_LIMIT[option]]:
            raise ConfigurationError(
                f"limits= and {', '.join(given)} exclude each other: give each scope a Limit of its own, with these"
            )
        return limits

    @property
    def _max_queued_total(self) -> int:
        return 10 * self.max_queued if self.max_queued_total is None else self.max_queued_total

    def _make_room(self) -> WaitingRoom[Hashable]:
        return WaitingRoom(
            self._max_queued_total if self.max_queued else 0,
            max_queued_per_tenant=max(1, self.max_queued),
            weights=weight_function(self.weights),
            ageing=self.ageing,
        )

    def _forget(self) -> None:
        self._quotas.clear()
        self._waiters.forget()
        if self._shared is not None:
            self._shared.forget()

    def check_door(self, door: Door) -> None:
        """Refuse to count tokens where there is no prompt to estimate them from, and nobody else says how many."""
        if door != "client" and self._quotas.counts_tokens and isinstance(self.estimate, TokenEstimate):
            where = "a request at the ASGI door" if door == "asgi" else "a function"
            raise ConfigurationError(
                f"{self.name}: {where} has no prompt to estimate tokens from: give estimate="
            )

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Take what the call needs of every limit, waiting for it if need be, and await the rest of the pipeline."""
        if self._loop.loop is not call.loop:
            self._loop.bind(call.loop)
        now = call.loop.time()
        reservation = self._reserve(call, now)
        if self._shared is not None:
            return self._take_shared(call, call_next, self._shared, reservation)
        if self.dry_run:
            if not self._rehearse(call, reservation, now):
                return call_next(call)
        elif self._waiters.queue.waiting or not reservation.take_at_once(now):
            return self._wait(call, call_next, reservation, now)
        return self._send(call, call_next, reservation)

    async def _take_shared(
        self, call: Call, call_next: CallNext, shared: SharedQuotas, reservation: Reservation
    ) -> Reply:
        # The quotas were told to make these.
        taken = await shared.take(call, cast("ViewReservation", reservation), call.loop.time())
        if taken is None:
            return await call_next(call)
        return await self._send(call, call_next, reservation, taken)

    async def _wait(self, call: Call, call_next: CallNext, reservation: Reservation, now: float) -> Reply:
        if error := self._oversized(reservation, now):
            call.telemetry.rejected(call, error)
            raise error
        await self._waiters.take(call, reservation, now)
        return await self._send(call, call_next, reservation)

    def _send(
        self, call: Call, call_next: CallNext, reservation: Reservation, taken: SharedTake | None = None
    ) -> Awaitable[Reply]:
        """Await the rest of the pipeline, with what was taken until the call ends."""
        finish = partial(self._finish, call, reservation)
        call.on_finish(finish if taken is None else partial(finish, taken=taken))
        if not self._quotas.mirrored or call.inbound:
            return call_next(call)
        return self._send_and_learn(call, call_next, reservation, taken)

    async def _send_and_learn(
        self, call: Call, call_next: CallNext, reservation: Reservation, taken: SharedTake | None
    ) -> Reply:
        try:
            reply = await call_next(call)
        except AttemptError as error:
            headers = [] if error.reply is None else error.reply.headers
            self._learn(call, reservation, taken, headers, error.outcome)
            raise
        if reply.headers:
            self._learn(call, reservation, taken, reply.headers)
        return reply

    def _reserve(self, call: Call, now: float) -> Reservation:
        requests = 1.0 if self.cost is None else amount("cost", self.cost, call, otherwise=_one)
        tokens = 0.0
        if self._quotas.counts_tokens:
            tokens = estimate_once(call, self.estimate)
        return self._quotas.reserve(call, now, requests, tokens)

    def _oversized(self, reservation: Reservation, now: float) -> CostExceedsCapacityError | None:
        return self._quotas.oversized(reservation, now, borrow=self.oversize == "borrow", name=self.name)

    def _rehearse(self, call: Call, reservation: Reservation, now: float) -> bool:
        """Do for a dry run as if the call waited: a debt stands for the queue. `False` when it would be refused."""
        if error := self._oversized(reservation, now):
            call.telemetry.rejected(call, error, dry_run=True)
            return False
        wait = self._waiters.would_take(call, reservation, now)
        if wait:
            would: Mapping[str, str | float] = {LIMITER_NAME: self.name, WAIT_TIME: wait, DRY_RUN: True}
            call.telemetry.event(call, "would_wait", would)
        return wait is not None

    def _finish(
        self, call: Call, reservation: Reservation, outcome: Outcome, *, taken: SharedTake | None = None
    ) -> None:
        now = call.ended
        used: float | None = None
        if outcome.verdict is not _SUCCESS and never_sent(call, outcome):
            reservation.cancel(now)
        else:
            if self._quotas.counts_tokens:
                used = tokens_used(call, outcome, self.estimate)
            if used is None:
                reservation.keep()
                return
            self._quotas.settle(reservation, used, now)
        if taken is not None and self._shared is not None:
            self._shared.view.settle(call, taken, reservation, used)
        self._waiters.give_back(call.tenant, now, reservation)

    def _learn(
        self,
        call: Call,
        reservation: Reservation,
        taken: SharedTake | None,
        headers: Headers,
        outcome: Outcome | None = None,
    ) -> None:
        """Lower the levels of limits that mirror the provider's to what its reply says."""
        if not headers and outcome is None:
            return
        now = call.loop.time()
        before = [] if taken is None else [bucket.level(now) for bucket, _ in reservation.charges]
        # Only for a reset given as a date by a reply without one; that is on the world's clock.
        levels = rate_limit_levels(headers, datetime.now(UTC).timestamp())  # noqa: TID251
        refused = False
        if outcome is not None and outcome.verdict is Verdict.THROTTLED:
            exact = outcome.retry_after_source != "ratelimit-reset"
            retry_after = outcome.retry_after if exact else None
            refused = retry_after is None
            learn_refusal(levels, reservation, self._quotas.mirrored, now, retry_after=retry_after)
        if levels:
            learn(levels, reservation, self._quotas.mirrored, now, refused=refused)
        if taken is not None and self._shared is not None:
            self._shared.view.lower(call, taken, reservation, before)

    def levels(self, call: Call) -> tuple[LimitLevel, ...]:
        """Say where the limits of a call stand, for `RateLimit` headers and the like."""
        return self._quotas.peek(call, call.loop.time())

    def queued(self) -> int:
        """Count the calls that wait."""
        return self._waiters.queued

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauge `limit.remaining`, by limit, of the key that has least, and those of the store."""
        if self.store is not None:
            self.store.guard.observe(telemetry)
        telemetry.observe(
            "limit.remaining", self._observe, "1", "What remains of a limit, for who has least", merge=min
        )

    def _observe(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        for scope, dimension, remaining in self._quotas.lowest(self._clock()):
            yield remaining, {LIMITER_NAME: f"{self.name}:{scope}", LIMIT_UNIT: dimension}

    def _clock(self) -> float:
        """Give the time, or in a thread where trio's cannot be read, one so early that nothing is refilled by it."""
        loop = self._loop.loop
        try:
            return -math.inf if loop is None else loop.time()
        except RuntimeError:
            return -math.inf


def _one(_call: Call) -> float:
    return 1.0


_OF_A_LIMIT: Mapping[str, Any] = {
    option.name: option.default
    for option in fields(RateLimit)
    if option.name in {"requests_per_minute", "tokens_per_minute", "burst", "key", "window", "learn"}
}
"""The options that stand for those of a single `Limit`, and what they are where nothing is given."""
