"""What policies ask of a store, part by part: whoever writes a store implements these, and nothing else is called.

A store offers the parts it has as attributes: `rates` here; leases, circuits, values have protocols of their own beside
this file. Nothing in here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLevel, TakeMode

if TYPE_CHECKING:
    from resilient_llm.stores.guard import StoreGuard

__all__ = ["HearLevels", "RateStore", "Store"]

HearLevels: TypeAlias = Callable[[Sequence[RateLevel]], None]
"""Told where the buckets stand that were changed, in the event loop, once the store has said so."""


class Store(Protocol):
    """What every store has, whatever its parts.

    `guard` says whether it can be asked, and what policies do while it cannot. `processes` is how many share it, as
    far as this one knows: at least 1.
    """

    guard: StoreGuard

    @property
    def processes(self) -> int:
        """Give the number of processes that were alive when the store was last heard of, this one among them."""
        ...

    async def aclose(self) -> None:
        """Send what is still to be sent, and close what the store opened."""
        ...


class RateStore(Store, Protocol):
    """A store of rate limits."""

    @property
    def rates(self) -> Rates:
        """Give the rate limits."""
        ...


class Rates(Protocol):
    """Decide about rate limits: as `core.shared_rate.RateLedger` does, which says what each method means.

    All charges of one call are decided on at once. `account` is what they have in common: a store that spreads keys
    over servers keeps those of one account together.
    """

    async def take(
        self,
        account: str,
        charges: Sequence[RateCharge],
        *,
        most_wait: float = 0.0,
        mode: TakeMode = "n",
        undone: HearLevels | None = None,
    ) -> RateDecision:
        """Take all that a call needs, or nothing.

        Cancelled, it leaves nothing taken and nothing held, nor what the charges say was held before; where the store
        has to be told so, `undone` hears of it. Raises `StoreUnavailableError`, within the store's timeout.
        """
        ...

    def settle(self, account: str, changes: Sequence[Change], heard: HearLevels | None = None) -> None:
        """Give back, charge, or free what was held: soon, and nobody waits for it."""
        ...

    def lower(
        self,
        account: str,
        charges: Sequence[RateCharge],
        pauses: Sequence[float],
        heard: HearLevels | None = None,
    ) -> None:
        """Lower the levels of buckets to the `amount` of each charge, and pause each: soon."""
        ...
