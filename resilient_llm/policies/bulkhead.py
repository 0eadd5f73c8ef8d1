"""Compartments, so that one tenant's calls cannot take every slot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import anyio

from resilient_llm.context import current
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import BulkheadFullError, ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.policies._keyed import Key, Keyed, key_function
from resilient_llm.policies._options import at_least, seconds
from resilient_llm.policies._shares import Cost, Weights, cost_function, weight_function
from resilient_llm.policies._slots import SlotPool
from resilient_llm.telemetry.names import LIMITER_NAME

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.outcome import Outcome
    from resilient_llm.telemetry import Telemetry

__all__ = ["Bulkhead"]

_CREDIT = 24
"""How many calls early a key may be served that had less than its share. With so many, calls that come at random at
up to 80 % of a share wait as if they always came first, once some have come; without any they would wait twice as
long at 50 % of it, and four times at 80 %."""

_ROOM = 10
"""How many keys with a full queue each there is room for in a shared pool, unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bulkhead:
    """Let at most `max_concurrent` calls of one key run at once.

    Up to `max_queued` more wait their turn, first come first served and a higher priority before (`ageing`
    seconds in the queue count as much as one level of it), each for at most `max_wait` seconds and never past
    its deadline. A slot is held until the reply has been read to its end. Counted in this process only. Raises
    `BulkheadFullError` with a guess at `retry_after`.

    Without `shared` each key has slots of its own, for at most `max_keys` keys. With it there are so many slots
    for all keys together: as long as one is free it is anybody's, and those who wait are served in turn among
    keys, in proportion to their `weights` (1 by default) and by the `cost` of their calls: `"tokens"` for their
    estimated tokens, or a function of the call; 1 for each by default. However long one key's queue, another's
    next call waits for no more than a slot or two to be freed, as long as it stays within its share; see
    `WaitingRoom` for the exact bounds. `max_concurrent` and `max_queued` are still those of one key;
    `max_queued_total` (10 times `max_queued`) bounds the queue of all.

    With `dry_run` all of that is counted and reported, nothing waits and nothing is refused.

    Source: the bulkhead of Nygard, "Release It!"; hand-off to the first waiter as in failsafe-go.
    """

    max_concurrent: int
    max_queued: int = 100
    max_wait: float = 30.0
    key: Key = "tenant"
    shared: int | None = None
    max_queued_total: int | None = None
    weights: Weights | None = None
    cost: Cost | None = None
    ageing: float = 10.0
    max_keys: int = 10_000
    dry_run: bool = False
    name: str = "bulkhead"
    _compartments: Keyed[SlotPool] = field(init=False, repr=False)
    _key: Callable[[Call], Hashable] = field(init=False, repr=False)
    _cost: Callable[[Call], float] = field(init=False, repr=False)
    _requests: set[Call] = field(init=False, repr=False, default_factory=set)
    placement: ClassVar[Placement] = Placement.ADMISSION
    attempt_placement: ClassVar[Placement] = Placement.ATTEMPT_CONCURRENCY

    def __post_init__(self) -> None:
        at_least(1, max_concurrent=self.max_concurrent, max_keys=self.max_keys)
        at_least(0, max_queued=self.max_queued)
        seconds(max_wait=self.max_wait, zero=True, infinite=True)
        seconds(ageing=self.ageing, zero=True)
        if self.shared is None:
            for option in ("max_queued_total", "weights", "cost"):
                if getattr(self, option) is not None:
                    raise ConfigurationError(
                        f"{option}={getattr(self, option)!r}: allowed only with shared=, where keys share slots"
                    )
        else:
            at_least(self.max_concurrent, shared=self.shared)
            if self.max_queued_total is not None:
                at_least(self.max_queued, max_queued_total=self.max_queued_total)
        by_key = self.key if self.shared is None else _one_for_all
        compartments = Keyed(self.name, by_key, self._make, idle=SlotPool.idle, max_keys=self.max_keys)
        object.__setattr__(self, "_compartments", compartments)
        object.__setattr__(self, "_key", key_function(self.key) if self.shared else _one_for_all)
        object.__setattr__(self, "_cost", cost_function(self.cost))
        weight_function(self.weights)

    def _make(self, _key: Hashable) -> SlotPool:
        if self.shared is None:
            limit, cap = self.max_concurrent, None
            room = WaitingRoom[Hashable](self.max_queued, ageing=self.ageing)
        else:
            limit, cap = self.shared, self.max_concurrent
            total = _ROOM * self.max_queued if self.max_queued_total is None else self.max_queued_total
            room = WaitingRoom(
                total if self.max_queued else 0,
                max_queued_per_tenant=self.max_queued or None,
                weights=weight_function(self.weights),
                ageing=self.ageing,
                credit=_CREDIT,
            )
        return SlotPool(
            limit,
            room,
            name=self.name,
            max_wait=self.max_wait,
            error=BulkheadFullError,
            max_per_tenant=cap,
        )

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Take a slot, waiting for it if need be, and await the rest of the pipeline."""
        pool = self._compartments(call)
        tenant = self._key(call)
        if self.dry_run:
            pool.rehearse(call, tenant, cost=self._cost(call))
            return await call_next(call)
        self._check_nesting(call)
        if not pool.slots.try_acquire(tenant):
            # What a call costs can be costly to find out: not for one that is turned away.
            cost = 1.0 if pool.slots.room.is_full(tenant) else self._cost(call)
            await pool.acquire(call, tenant, cost=cost)
        call.on_finish(partial(_release, call.loop, pool, tenant, call.loop.time()))
        if call.inbound:
            self._requests.add(call)
            call.on_finish(partial(self._forget, call))
        return await call_next(call)

    def _check_nesting(self, call: Call) -> None:
        if self._requests and not call.inbound and current.get().owner in self._requests:
            raise ConfigurationError(
                f"{self.name} stands at the ASGI door and at that of a client behind it: requests that hold all of "
                "its slots would wait for their own calls to get one; make two of them"
            )

    def _forget(self, request: Call, _outcome: Outcome) -> None:
        self._requests.discard(request)

    def resize(self, max_concurrent: int | None = None, *, shared: int | None = None) -> None:
        """Change the number of slots of every key, or of the shared pool; those in use stay until released.

        Raises `ConfigurationError` for `shared` where there is no shared pool.
        """
        if max_concurrent is not None:
            at_least(1, max_concurrent=max_concurrent)
        if shared is not None:
            if self.shared is None:
                raise ConfigurationError(f"shared={shared!r}: this bulkhead was made without a shared pool")
            at_least(1, shared=shared)
            object.__setattr__(self, "shared", shared)
        if max_concurrent is not None:
            object.__setattr__(self, "max_concurrent", max_concurrent)
        for pool in self._compartments.values():
            if self.shared is None:
                pool.resize(self.max_concurrent, anyio.current_time())
            else:
                pool.resize(self.shared, anyio.current_time(), max_per_tenant=self.max_concurrent)

    def in_use(self) -> int:
        """Count the slots in use over all keys."""
        return sum(pool.slots.in_use for pool in self._compartments.values())

    def queued(self) -> int:
        """Count the calls waiting over all keys."""
        return sum(len(pool.slots.room) for pool in self._compartments.values())

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauges `bulkhead.active` and `bulkhead.queued`."""
        telemetry.observe("bulkhead.active", self._observe_active, "{call}", "Calls that hold a slot")
        telemetry.observe("bulkhead.queued", self._observe_queued, "{call}", "Calls that wait for a slot")

    def _observe_active(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        yield self.in_use(), {LIMITER_NAME: self.name}

    def _observe_queued(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        yield self.queued(), {LIMITER_NAME: self.name}


def _one_for_all(_call: Call) -> Hashable:
    return None


def _release(loop: EventLoop, pool: SlotPool, tenant: Hashable, since: float, _outcome: Outcome) -> None:
    pool.release(loop.time(), since=since, tenant=tenant)
