"""Compartments, so that one tenant's calls cannot take every slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import at_least, flag, label, seconds, store_of
from resilient_llm.context import enclosing
from resilient_llm.errors import BulkheadFullError, ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.policies._keyed import Key, Keyed, key_function, one_for_all
from resilient_llm.policies._shared_slots import SharedSlotPool, observe_leases, pool_name
from resilient_llm.policies._shares import Cost, Weights, cost_function, fair_room
from resilient_llm.policies._slots import SlotPool
from resilient_llm.telemetry.names import LIMITER_NAME, TENANT

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.core.slots import Slots
    from resilient_llm.message import Reply
    from resilient_llm.stores.protocol_leases import LeaseStore
    from resilient_llm.telemetry import Telemetry

__all__ = ["Bulkhead"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bulkhead:
    """Let at most `max_concurrent` calls of one key run at once.

    Up to `max_queued` more wait their turn, first come first served and a higher priority before (`ageing`
    seconds in the queue count as much as one level of it), each for at most `max_wait` seconds and never past
    its deadline. A slot is held until the reply has been read to its end. Counted in this process only; with a
    `store`, by `name` and for all processes that share it, each of which has a queue of its own. Raises
    `BulkheadFullError` with a guess at `retry_after`, and `StoreUnavailableError` where a store that does not answer
    is to refuse calls.

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
    store: LeaseStore | None = None
    name: str = "bulkhead"
    _compartments: Keyed[SlotPool] = field(init=False, repr=False)
    _key: Callable[[Call], Hashable] = field(init=False, repr=False)
    _cost: Callable[[Call], float] = field(init=False, repr=False)
    placement: ClassVar[Placement] = Placement.ADMISSION
    attempt_placement: ClassVar[Placement] = Placement.ATTEMPT_CONCURRENCY

    def __post_init__(self) -> None:
        at_least(1, max_concurrent=self.max_concurrent, max_keys=self.max_keys)
        seconds(max_wait=self.max_wait, zero=True, infinite=True)
        flag(dry_run=self.dry_run)
        label(name=self.name)
        store_of("leases", "leases", self.store)
        if self.shared is None:
            for option in ("max_queued_total", "weights", "cost"):
                if getattr(self, option) is not None:
                    raise ConfigurationError(
                        f"{option}={getattr(self, option)!r}: allowed only with shared=, where keys share slots"
                    )
        else:
            at_least(self.max_concurrent, shared=self.shared)
        by_key = self.key if self.shared is None else one_for_all
        in_store = self.store is not None
        compartments = Keyed(
            self.name, by_key, self._make, idle=_is_idle, max_keys=self.max_keys, in_store=in_store
        )
        object.__setattr__(self, "_compartments", compartments)
        object.__setattr__(self, "_key", key_function(self.key, in_store=in_store))
        object.__setattr__(self, "_cost", cost_function(self.cost))
        self._make(None)  # validates

    def _make(self, key: Hashable) -> SlotPool:
        room = fair_room(
            max_queued=self.max_queued,
            max_queued_total=self.max_queued_total,
            weights=self.weights,
            ageing=self.ageing,
        )
        limit = self.max_concurrent if self.shared is None else self.shared
        max_per_tenant = None if self.shared is None else self.max_concurrent
        if self.store is not None:
            return SharedSlotPool(
                limit,
                room,
                store=self.store,
                pool=pool_name(self.name, key),
                name=self.name,
                max_wait=self.max_wait,
                error=BulkheadFullError,
                max_per_tenant=max_per_tenant,
            )
        return SlotPool(
            limit,
            room,
            name=self.name,
            max_wait=self.max_wait,
            error=BulkheadFullError,
            max_per_tenant=max_per_tenant,
        )

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Take a slot, waiting for it if need be, and await the rest of the pipeline."""
        pool = self._compartments.of(call)
        tenant = None if self.shared is None else self._key(call)
        if self.dry_run:
            asked = pool.rehearse(call, tenant, cost=self._cost(call))
            return call_next(call) if asked is None else _after(asked, call, call_next)
        if enclosing.get() is not None:
            pool.check_nesting()
        if not pool.slots.try_acquire(tenant):
            return self._wait(call, call_next, pool, tenant)
        pool.hold(call, tenant)
        return call_next(call)

    async def _wait(self, call: Call, call_next: CallNext, pool: SlotPool, tenant: Hashable) -> Reply:
        # What a call costs can be costly to find out: not for one that is turned away.
        cost = 1.0 if pool.slots.room.is_full(tenant, call.loop.time()) else self._cost(call)
        await pool.acquire(call, tenant, cost=cost)
        pool.hold(call, tenant)
        return await call_next(call)

    def resize(self, max_concurrent: int | None = None, *, shared: int | None = None) -> None:
        """Change the number of slots of every key, or of the shared pool; those in use stay until released.

        From any thread; in another it takes effect as soon as the event loop comes to it. Raises
        `ConfigurationError` for `shared` where there is no shared pool, or one smaller than `max_concurrent`.
        """
        if max_concurrent is not None:
            at_least(1, max_concurrent=max_concurrent)
        if shared is not None and self.shared is None:
            raise ConfigurationError(f"shared={shared!r}: this bulkhead was made without a shared pool")
        if self.shared is not None:
            slots = self.shared if shared is None else shared
            if max_concurrent is not None and max_concurrent > slots and shared is None:
                raise ConfigurationError(
                    f"max_concurrent={max_concurrent!r}: allowed are whole numbers up to shared={slots}"
                )
            at_least(max_concurrent or self.max_concurrent, shared=slots)
        if shared is not None:
            object.__setattr__(self, "shared", shared)
        if max_concurrent is not None:
            object.__setattr__(self, "max_concurrent", max_concurrent)
        self._compartments.change(self._resize)

    def _resize(self, pool: SlotPool, now: float) -> None:
        if self.shared is None:
            pool.resize(self.max_concurrent, now)
        else:
            pool.resize(self.shared, now, max_per_tenant=self.max_concurrent)

    def in_use(self) -> int:
        """Count the slots in use over all keys."""
        return sum(pool.slots.in_use for pool in self._compartments.values())

    def queued(self) -> int:
        """Count the calls waiting over all keys."""
        return sum(len(pool.slots.room) for pool in self._compartments.values())

    def observe(self, telemetry: Telemetry) -> None:
        """Report `bulkhead.active` and `bulkhead.queued`, by tenant where that is the key, and gauges of the store."""
        if self.store is not None:
            observe_leases(telemetry, self.store)
        telemetry.observe("bulkhead.active", self._observe_active, "{call}", "Calls that hold a slot")
        telemetry.observe("bulkhead.queued", self._observe_queued, "{call}", "Calls that wait for a slot")

    def _observe_active(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        by_tenant = self._by_tenant(lambda slots: slots.in_use, lambda slots: slots.held)
        return self._series(self.in_use(), by_tenant)

    def _observe_queued(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        by_tenant = self._by_tenant(lambda slots: len(slots.room), lambda slots: slots.room.depths())
        return self._series(self.queued(), by_tenant)

    def _by_tenant(
        self,
        own: Callable[[Slots[Hashable]], int],
        split: Callable[[Slots[Hashable]], Mapping[Hashable, int]],
    ) -> dict[str, int]:
        """Count for each tenant, where that is the key, in slots of its own or in those that tenants share."""
        if self.key != "tenant":
            return {}
        counts: dict[str, int] = {}
        for key, pool in self._compartments.items():
            of_pool = {key: own(pool.slots)} if self.shared is None else split(pool.slots)
            counts |= {tenant: count for tenant, count in of_pool.items() if isinstance(tenant, str)}
        return counts

    def _series(self, total: int, by_tenant: Mapping[str, int]) -> Iterable[tuple[float, Mapping[str, str]]]:
        """Give the total in parts: of each tenant, and of nobody that is known."""
        yield max(0, total - sum(by_tenant.values())), {LIMITER_NAME: self.name}
        for tenant, count in by_tenant.items():
            yield count, {LIMITER_NAME: self.name, TENANT: tenant}


def _is_idle(pool: SlotPool, now: float) -> bool:
    return pool.idle(now)  # each kind of pool says it itself


async def _after(asked: Awaitable[None], call: Call, call_next: CallNext) -> Reply:
    await asked
    return await call_next(call)
