"""A limit on the attempts in flight that finds its own size."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import at_least, flag, label, number, seconds, store_of, synchronous
from resilient_llm.context import enclosing
from resilient_llm.core.aimd import AIMDLimit, LimitAlgorithm, Sent
from resilient_llm.errors import ConcurrencyLimitError, ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.outcome import Outcome, Scope, Verdict
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.policies._keyed import MAX_REPORTED, Key, Keyed, is_of_target, series
from resilient_llm.policies._shared_slots import SharedSlotPool, observe_leases, pool_name
from resilient_llm.policies._shares import Weights, fair_room
from resilient_llm.policies._slots import SlotPool
from resilient_llm.policies._voted_slots import VotedSlotPool
from resilient_llm.telemetry.names import LIMITER_NAME

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.stores.protocol_leases import LeaseStore
    from resilient_llm.telemetry import Telemetry

__all__ = ["ConcurrencyLimit"]

_SUCCESS = Verdict.SUCCESS
_OVERLOADED = frozenset({503, 504, 529})
_KEPT = "the limit stays as it is"


class _KeyedLimit:
    """The limit of one key, the slots it is the number of, and in a dry run what is in flight all the same."""

    __slots__ = ("algorithm", "key", "pool", "running")

    def __init__(self, key: Hashable, algorithm: LimitAlgorithm, pool: SlotPool) -> None:
        self.key = key
        self.algorithm = algorithm
        self.pool = pool
        self.running = 0

    @property
    def in_flight(self) -> int:
        """Count the attempts that hold a slot, in all processes that share them."""
        return self.pool.held if isinstance(self.pool, SharedSlotPool) else self.pool.slots.in_use


@dataclass(frozen=True, kw_only=True, eq=False)
class ConcurrencyLimit:
    """Let as many attempts run at once as their target can take, and find out how many that is.

    The limit starts at `initial` and stays between `min` and `max`. Throttling (429), overload (503, 504, 529)
    and timeouts make it `decrease_ratio` times itself, at most once per round trip; so does, more gently, a
    rise in concurrency of which less than `min_gain_ratio` came out as throughput (`None`: that is not looked
    at). Successes make it grow by one per round trip while it is in use. Other failures, cancellations and
    refusals on this side count for nothing. `algorithm` makes another `LimitAlgorithm` for each key, in place
    of `AIMDLimit` with these options.

    Up to `max_queued` attempts of one tenant, and `max_queued_total` (10 times as many) of all, wait for a slot:
    in turn among tenants, in proportion to their `weights` (1 by default), inside a tenant by priority (`ageing`
    as in `WaitingRoom`), each for at most `max_wait` seconds and never past its deadline. A slot is held until the
    reply has been read to its end. With `dry_run` everything is counted and reported, nothing waits and nothing is
    refused. Raises `ConcurrencyLimitError` with a guess at `retry_after`. For a limit that is known use
    `Bulkhead(key="target")`.

    Each process finds its own share. With a `store` all that share it have one limit, by `name`: each finds out how
    many attempts of all may be in flight, and the mean of what they find is the limit. Then `StoreUnavailableError` is
    raised where a store that does not answer is to refuse calls.
    """

    initial: int = 20
    min: int = 1
    max: int = 200
    decrease_ratio: float = 0.7
    min_gain_ratio: float | None = 0.25
    max_queued: int = 100
    max_wait: float = 30.0
    key: Key = "target"
    max_queued_total: int | None = None
    weights: Weights | None = None
    ageing: float = 10.0
    max_keys: int = 10_000
    algorithm: Callable[[], LimitAlgorithm] | None = None
    dry_run: bool = False
    store: LeaseStore | None = None
    name: str = "concurrency_limit"
    # Not a limit on calls: between a call's attempts lie backoffs, which are no time of the target's.
    placement: ClassVar[Placement] = Placement.ATTEMPT_CONCURRENCY
    _limits: Keyed[_KeyedLimit] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        at_least(1, initial=self.initial, min=self.min, max=self.max, max_keys=self.max_keys)
        number(0, 1, inside=True, decrease_ratio=self.decrease_ratio)
        number(0, 1, below=True, none=True, min_gain_ratio=self.min_gain_ratio)
        seconds(max_wait=self.max_wait, zero=True, infinite=True)
        flag(dry_run=self.dry_run)
        label(name=self.name)
        store_of("leases", "leases", self.store)
        synchronous(algorithm=self.algorithm)
        if self.algorithm is not None and not callable(self.algorithm):
            raise ConfigurationError(
                f"algorithm={self.algorithm!r}: allowed are functions that make a LimitAlgorithm, and None"
            )
        try:
            self._make(None)
        except ConfigurationError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            what = "" if self.algorithm is None else f"algorithm={self.algorithm!r} makes no LimitAlgorithm: "
            raise ConfigurationError(f"{what}{error}") from error
        limits = Keyed(
            self.name,
            self.key,
            self._make,
            idle=_is_idle,
            max_keys=self.max_keys,
            in_store=self.store is not None,
        )
        object.__setattr__(self, "_limits", limits)

    def _new_algorithm(self) -> LimitAlgorithm:
        if self.algorithm is not None:
            return self.algorithm()
        return AIMDLimit(
            initial=self.initial,
            minimum=self.min,
            maximum=self.max,
            decrease_ratio=self.decrease_ratio,
            min_gain_ratio=self.min_gain_ratio,
        )

    def _make(self, key: Hashable) -> _KeyedLimit:
        algorithm = self._new_algorithm()
        if not _is_count(algorithm.limit):
            raise ConfigurationError(
                f"algorithm={self.algorithm!r} makes a LimitAlgorithm whose limit is {algorithm.limit!r}: "
                "allowed are integers from 1"
            )
        room = fair_room(
            max_queued=self.max_queued,
            max_queued_total=self.max_queued_total,
            weights=self.weights,
            ageing=self.ageing,
        )
        if self.store is not None:
            shared = VotedSlotPool(
                algorithm.limit,
                room,
                store=self.store,
                pool=pool_name(self.name, key),
                name=self.name,
                max_wait=self.max_wait,
                error=ConcurrencyLimitError,
            )
            return _KeyedLimit(key, algorithm, shared)
        pool = SlotPool(
            algorithm.limit,
            room,
            name=self.name,
            max_wait=self.max_wait,
            error=ConcurrencyLimitError,
        )
        return _KeyedLimit(key, algorithm, pool)

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Take a slot, waiting for it if need be, and await the rest of the pipeline."""
        limit = self._limits.of(call)
        pool = limit.pool
        if self.dry_run:
            asked = pool.rehearse(call, call.tenant)
            limit.running += 1
            if asked is not None:
                return self._send_after(asked, call, call_next, limit)
            return self._send(call, call_next, limit, limit.running)
        if enclosing.get() is not None:
            pool.check_nesting()
        if not pool.slots.try_acquire(call.tenant):
            return self._wait(call, call_next, limit)
        return self._send(call, call_next, limit, pool.slots.in_use)

    async def _wait(self, call: Call, call_next: CallNext, limit: _KeyedLimit) -> Reply:
        await limit.pool.acquire(call, call.tenant)
        return await self._send(call, call_next, limit, limit.in_flight)

    async def _send_after(
        self, asked: Awaitable[None], call: Call, call_next: CallNext, limit: _KeyedLimit
    ) -> Reply:
        try:
            await asked
        except BaseException:
            limit.running -= 1
            raise
        return await self._send(call, call_next, limit, limit.in_flight)

    def _send(self, call: Call, call_next: CallNext, limit: _KeyedLimit, in_flight: int) -> Awaitable[Reply]:
        """Await the rest of the pipeline, with a slot until the call ends."""
        if not self.dry_run:
            call.taken += (limit.pool,)
        sent = Sent(call.loop.time(), in_flight, limit.algorithm.generation)
        call.on_finish(partial(self._finish, call, limit, call.tenant, sent))
        return call_next(call)

    def _finish(self, call: Call, limit: _KeyedLimit, tenant: Hashable, sent: Sent, outcome: Outcome) -> None:
        now, pool = call.ended, limit.pool
        dropped = outcome.verdict is not _SUCCESS
        try:
            if not dropped or _is_drop(outcome):
                size = limit.algorithm.on_sample(now, sent, dropped=dropped)
                if size != pool.slots.limit or self.store is not None:
                    self._resize(pool, size, now)
        except Exception as error:  # noqa: BLE001 - the algorithm may be the application's
            hook_failed("algorithm", self.algorithm, error, instead=_KEPT)
        finally:
            if self.dry_run:
                limit.running -= 1
            else:
                pool.release(now, sent.at, tenant)

    def _resize(self, pool: SlotPool, size: int, now: float) -> None:
        if _is_count(size):
            pool.resize(size, now)
        else:
            hook_gave("algorithm", self.algorithm, size, "integers from 1", instead=_KEPT)

    def limit(self, key: Hashable) -> int:
        """Give the limit of a key as it is now; of one that no attempt was made for, what it would begin with."""
        limit = self._limits.peek(key)
        return self._new_algorithm().limit if limit is None else limit.pool.slots.limit

    def limits(self) -> dict[Hashable, int]:
        """Give the limits there are, by their keys."""
        return {limit.key: limit.pool.slots.limit for limit in self._limits.values()}

    def keys_of(self, target: str) -> list[Hashable]:
        """Give the keys of the limits there are for a target."""
        return [one.key for one in self._limits.values() if is_of_target(self.key, one.key, target)]

    def in_use(self) -> int:
        """Count the slots in use over all keys."""
        return sum(limit.pool.slots.in_use for limit in self._limits.values())

    def queued(self) -> int:
        """Count the attempts waiting over all keys."""
        return sum(len(limit.pool.slots.room) for limit in self._limits.values())

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauges `concurrency.limit`, `concurrency.active` and `concurrency.queued`, and the store's."""
        if self.store is not None:
            observe_leases(telemetry, self.store)
        telemetry.observe(
            "concurrency.limit", self._observe_limit, "{attempt}", "Attempts that may be in flight"
        )
        telemetry.observe(
            "concurrency.active", self._observe_active, "{attempt}", "Attempts that hold a slot"
        )
        telemetry.observe(
            "concurrency.queued", self._observe_queued, "{attempt}", "Attempts that wait for a slot"
        )

    def _observe_limit(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        for _, limit in zip(range(MAX_REPORTED), self._limits.values(), strict=False):
            yield limit.pool.slots.limit, {LIMITER_NAME: series(self.name, self.key, limit.key)}

    def _observe_active(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        yield self.in_use(), {LIMITER_NAME: self.name}

    def _observe_queued(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        yield self.queued(), {LIMITER_NAME: self.name}


def _is_count(size: object) -> bool:
    """Tell whether a limit is one; the algorithm may be the application's."""
    return isinstance(size, int) and size >= 1


def _is_idle(limit: _KeyedLimit, now: float) -> bool:
    return limit.pool.idle(now)


def _is_drop(outcome: Outcome) -> bool:
    """Tell whether the target had too much to do, rather than something wrong with it or the request."""
    if outcome.verdict is Verdict.THROTTLED:
        return True
    if outcome.verdict is not Verdict.FAILURE:
        return False
    return outcome.scope is Scope.UPSTREAM or outcome.status in _OVERLOADED or outcome.timed_out
