"""How much all who wait need of each bucket, and which of its limits holds up a call that they are before.

In what order they are served must not enter here.
"""

from __future__ import annotations

from math import inf

from resilient_llm.core.quota import Reservation
from resilient_llm.core.token_bucket import TokenBucket

__all__ = ["Backlog"]


class Backlog:
    """Add up what is waited for."""

    __slots__ = ("_amounts",)

    def __init__(self) -> None:
        self._amounts: dict[TokenBucket, float] = {}

    def add(self, reservation: Reservation) -> None:
        """Count what one more call waits for."""
        for bucket, amount in reservation.charges:
            self._amounts[bucket] = self._amounts.get(bucket, 0.0) + amount

    def remove(self, reservation: Reservation) -> None:
        """Count it no longer."""
        for bucket, amount in reservation.charges:
            left = self._amounts.pop(bucket, 0.0) - amount
            if left > 0:
                self._amounts[bucket] = left

    def clear(self) -> None:
        """Forget everything."""
        self._amounts.clear()

    def scarcest(self, reservation: Reservation, now: float) -> int:
        """Say which charge would take longest if everybody who waits for its bucket went first."""

        def seconds(index: int) -> float:
            bucket, amount = reservation.charges[index]
            if amount <= 0:
                return -inf
            ahead = self._amounts.get(bucket, 0.0)
            # Of those of which there is enough, the one that would be used up next.
            return bucket.wait(amount, now, ahead) or (amount + ahead - bucket.level(now)) / bucket.rate

        return max(range(len(reservation.charges)), key=seconds)
