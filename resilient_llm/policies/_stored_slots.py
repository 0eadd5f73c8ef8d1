"""The slots that this process holds of those a store keeps for all: asked for, counted, and given back.

While the store does not answer its guard says who gets one. Who is next here, and who waits, must not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.core.slots import Slots
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import StoreUnavailableError
from resilient_llm.policies._store_events import tell_store
from resilient_llm.shared_keys import shared_key

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.stores.guard import StoreGuard
    from resilient_llm.stores.protocol_leases import Lease, LeaseStore

__all__ = ["ALL", "StoredSlots", "key_of"]

ALL = "all"
"""The key of all slots of a pool."""


def key_of(tenant: Hashable) -> str:
    """Give the key of a tenant's slots of a pool."""
    return f"of:{shared_key(tenant)}"


class StoredSlots(Slots[Hashable]):
    """Hold slots of a store's `pool`; of a tenant's, `max_per_tenant` at most in all processes."""

    __slots__ = ("_leases", "_out", "_processes", "_store", "held_by_all", "in_flight", "max_per_tenant")

    def __init__(
        self,
        limit: int,
        room: WaitingRoom[Hashable],
        *,
        store: LeaseStore,
        pool: str,
        on_free: Callable[[str], None],
        max_per_tenant: int | None = None,
    ) -> None:
        super().__init__(limit, room)
        self.held_by_all = 0
        """How many slots were held in all processes when the last one was granted here."""
        self.in_flight = 0
        """Requests that are on their way, of anybody."""
        self.max_per_tenant = max_per_tenant
        self._store = store
        self._leases = store.leases.pool(pool, on_free)
        self._out: dict[Hashable, list[Lease]] = {}
        self._processes = 1  # when the store last decided: one that is back may have to count them again

    @property
    def guard(self) -> StoreGuard:
        """Give what says whether the store is asked."""
        return self._store.guard

    async def ask(
        self, call: Call, tenant: Hashable, *, wait: bool = False, alone: bool = True
    ) -> LeaseAnswer | None:
        """Ask the store for a slot; `None` when it is granted, by the store or (`alone`) in its absence.

        With `wait` a place is kept at the store where it is refused. Raises `StoreUnavailableError`.
        """
        limits = self._limits(tenant)
        self.in_flight += 1
        try:
            got = await self._leases.acquire(limits, wait=wait)
        except StoreUnavailableError as error:
            self.guard.unguarded += 1
            if not alone:
                raise
            got = self._decide_alone(call, tenant, limits, error)
        else:
            self._processes = self._store.processes
        finally:
            self.in_flight -= 1
            tell_store(call, self.guard)
        if isinstance(got, LeaseAnswer):
            return got
        self._out.setdefault(tenant, []).append(got)
        self.in_use += 1
        self.held_by_all = got.held
        return None

    def _decide_alone(
        self, call: Call, tenant: Hashable, limits: tuple[LeaseLimit, ...], error: StoreUnavailableError
    ) -> Lease | LeaseAnswer:
        """Decide without the store, as its guard was told to."""
        if self.guard.on_error == "closed":
            call.telemetry.rejected(call, error)
            raise error
        processes = max(self._processes, self._store.processes)
        if self.guard.on_error == "local":
            here = [len(self._out.get(tenant, ())), self.in_use][-len(limits) :]
            for (key, most), held in zip(limits, here, strict=True):
                if held >= -(-most // processes):
                    return LeaseAnswer(key, held)
        lease = self._leases.adopt(limits)
        lease.held = (self.in_use + 1) * processes  # as good a guess as there is
        return lease

    @property
    def held(self) -> dict[Hashable, int]:
        """Tell how many slots each tenant has here that has any."""
        return {tenant: len(leases) for tenant, leases in list(self._out.items())}

    def release(self, tenant: Hashable, _now: float) -> tuple[()]:
        """Give a slot back; whom it is for, the store says."""
        self.in_use -= 1
        leases = self._out[tenant]
        lease = leases.pop()
        if not leases:
            del self._out[tenant]
        self._leases.release(lease)
        return ()

    def leave(self, tenants: Iterable[Hashable], *, everyone: bool) -> None:
        """Give up the places that are kept at the store for these tenants, or for `everyone` here."""
        unused: list[LeaseLimit] = []
        if self.max_per_tenant is not None:
            unused += [LeaseLimit(key_of(tenant), self.max_per_tenant) for tenant in tenants]
        if everyone:
            unused.append(LeaseLimit(ALL, self.limit))
        if unused:
            self._leases.leave(unused)

    def vote(self, number: int, heard: Callable[[float], None]) -> None:
        """Say what is taken here for the right number of slots."""
        self._leases.vote(number, heard)

    def try_acquire(self, _tenant: Hashable) -> bool:
        """Take none: the store is to be asked."""
        return False

    def resize(self, limit: int, _now: float, *, max_per_tenant: int | None = None) -> tuple[()]:
        """Take other numbers of slots to be right."""
        self.limit = limit
        if max_per_tenant is not None:
            self.max_per_tenant = max_per_tenant
        return ()

    def _limits(self, tenant: Hashable) -> tuple[LeaseLimit, ...]:
        whole = LeaseLimit(ALL, self.limit)
        if self.max_per_tenant is None:
            return (whole,)
        return LeaseLimit(key_of(tenant), self.max_per_tenant), whole
