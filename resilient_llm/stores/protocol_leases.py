"""What policies ask of a store that keeps leases: slots that several processes share.

What a lease is, and who gets the next one, `core.leases.LeaseTable` says; nothing in here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.stores.protocol import Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient_llm.telemetry import Telemetry

__all__ = ["Lease", "LeasePool", "LeaseStore", "Leases"]


class Lease:
    """Stand for one slot that this process holds, of each of its `limits`.

    It is renewed by its store until it is released. `held` is what the store counted when it was given out.
    """

    __slots__ = ("__weakref__", "held", "id", "known", "limits", "lost", "renewed")

    def __init__(self, id: str, limits: Sequence[LeaseLimit], held: int, renewed: float) -> None:  # noqa: A002
        self.id = id
        self.limits = limits
        self.held = held
        self.renewed = renewed
        """When it was asked for, or last renewed, on the event loop's clock: the store's to use."""
        self.known = True
        """Whether the store has heard of it."""
        self.lost = False
        """Whether it was not renewed in time and given to somebody else meanwhile."""


class LeaseStore(Store, Protocol):
    """A store of leases."""

    @property
    def leases(self) -> Leases:
        """Give the leases."""
        ...


class Leases(Protocol):
    """Keep leases in pools: all keys of a pool can be asked for together."""

    @property
    def lost(self) -> int:
        """Count the leases that were given to somebody else because this process was late in renewing them."""
        ...

    def pool(self, name: str, on_free: Callable[[str], None]) -> LeasePool:
        """Make this process's access to a pool; nothing is asked or sent.

        `on_free` is called in the event loop with a key at which this access keeps a place, when a lease of it may
        be free: once for each that is, if need be before the answer that a place is kept, and now and then in any case.
        """
        ...

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauge `store.leases_lost`, where leases can be lost."""
        ...


class LeasePool(Protocol):
    """One access to a pool of leases, with a place of its own in each line: a policy's, in one process."""

    async def acquire(self, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease | LeaseAnswer:
        """Ask for a lease of every key in `limits`, of which none may have more out than it says.

        Refused, it gives what the store said; with `wait` a place is kept then in the line of the key that refused,
        until a lease of that key is granted to this access, or `leave`. Cancelled, it leaves no lease; where one had
        been granted already `on_free` is called once it is back, since it took the place. Raises
        `StoreUnavailableError`, within the store's timeout; with `wait` `on_free` is called now and then all the same.
        """
        ...

    def adopt(self, limits: Sequence[LeaseLimit]) -> Lease:
        """Give out a lease without asking; the store counts it as soon as it can be told, whatever the limits."""
        ...

    def release(self, lease: Lease) -> None:
        """Give a lease back: soon, and nobody waits for it."""
        ...

    def leave(self, limits: Iterable[LeaseLimit]) -> None:
        """Give up the places kept at these keys, if there are any; what was free for them is for the next in line.

        Soon, and nobody waits for it; then `on_free` is called, since a place may have been taken again meanwhile.
        """
        ...

    def vote(self, number: float, heard: Callable[[float], None]) -> None:
        """Say what this access takes for the right number of slots; `heard` is told the mean of what all take it for.

        It counts until the lease time has passed without another vote.
        """
        ...
