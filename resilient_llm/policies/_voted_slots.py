"""A pool of slots that several processes share, and of which they find out together how many there should be.

What each takes for the right number, its algorithm says; how slots are shared, `_shared_slots`.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING

from resilient_llm._loop import EventLoop
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import RejectedError
from resilient_llm.policies._shared_slots import SharedSlotPool

if TYPE_CHECKING:
    from resilient_llm.stores.protocol_leases import LeaseStore

__all__ = ["VotedSlotPool"]

_VOTE_EVERY = 5.0
"""Seconds after which a vote is cast again although it is the same: a third of the shortest time that it counts."""


class VotedSlotPool(SharedSlotPool):
    """Keep as many slots in a store as its processes take for the right number, on average.

    Each votes for what its algorithm finds, when that changes and every 5 seconds while it is in use.
    """

    __slots__ = ("_vote", "_voted_at")

    def __init__(
        self,
        limit: int,
        room: WaitingRoom[Hashable],
        *,
        store: LeaseStore,
        pool: str,
        name: str,
        max_wait: float,
        error: type[RejectedError],
    ) -> None:
        super().__init__(limit, room, store=store, pool=pool, name=name, max_wait=max_wait, error=error)
        self._vote = 0
        self._voted_at = -inf

    def resize(self, limit: int, now: float, *, max_per_tenant: int | None = None) -> None:  # noqa: ARG002
        """Vote for a number of slots."""
        if not self._guard.closed:
            super().resize(limit, now)  # there is nobody else to agree with
        elif limit != self._vote or now - self._voted_at >= _VOTE_EVERY:
            self._vote, self._voted_at = limit, now
            self.slots.vote(limit, self._hear)

    def _hear(self, mean: float) -> None:
        limit = max(1, round(mean))
        if limit != self.slots.limit:
            super().resize(limit, EventLoop.current().time())
