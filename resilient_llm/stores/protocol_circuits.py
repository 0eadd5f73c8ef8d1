"""What circuit breakers ask of a store: to agree on the states of circuits, and to hear of changes.

A store keeps records and compares versions; what a record means, and what to do about it, `core/circuit.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from resilient_llm.core.circuit_state import CircuitSnapshot
from resilient_llm.stores.protocol import Store

__all__ = ["Agreed", "CircuitGroup", "CircuitStore", "Circuits", "HearAgreed", "HearChange"]


class Agreed(NamedTuple):
    """Say what is agreed on of one circuit.

    `version` rises with every change of any circuit of the group; `made` names the group's memory: a store that has
    lost it begins another, whose versions have nothing to do with those before. `accepted` tells who offered a record
    whether it is this one. The snapshot's times are in seconds left when the store replied.
    """

    made: int
    version: int
    snapshot: CircuitSnapshot
    accepted: bool = False


HearChange: TypeAlias = Callable[[str | None, Agreed | None], None]
"""Told a circuit that has changed and what is agreed on now; then, once for all that was heard, `None` twice."""

HearAgreed: TypeAlias = Callable[[Agreed], None]


class CircuitStore(Store, Protocol):
    """A store of circuits."""

    @property
    def circuits(self) -> Circuits:
        """Give the circuits."""
        ...


class Circuits(Protocol):
    """Keep circuits, in groups: those of one breaker, in all processes."""

    def join(self, group: str, hear: HearChange) -> CircuitGroup:
        """Take part in a group: `hear` is told of changes, in the event loop, while the group is used."""
        ...


class CircuitGroup(Protocol):
    """Take part in a group of circuits, for one breaker and one event loop.

    A breaker that is in use hears within half a second of what others have changed. `made` names the memory of the
    store that it heard last, 0 before.
    """

    made: int

    def fresh(self, now: float) -> bool:
        """Tell whether all was heard that is older than a second; the group counts as used, and is kept so."""
        ...

    async def refresh(self) -> None:
        """Hear what has changed, before this returns.

        Raises `StoreUnavailableError`, within the store's timeout.
        """
        ...

    async def swap(self, key: str, expected: int, snapshot: CircuitSnapshot, late: HearAgreed) -> Agreed:
        """Put a circuit's snapshot in the place of the one with version `expected`, else give the one there is.

        Of a circuit that the store does not know any version is right. A reply that comes when nobody waits for it
        any more is told to `late`. Raises `StoreUnavailableError`, within the store's timeout.
        """
        ...

    def swap_soon(self, key: str, expected: int, snapshot: CircuitSnapshot, heard: HearAgreed) -> None:
        """Do as `swap` does, soon, without anybody waiting; `heard` is not told what was lost on the way."""
        ...
