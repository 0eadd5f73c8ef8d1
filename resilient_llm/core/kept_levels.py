"""What of each bucket is kept for the lanes before, while a rate queue looks for whom it can serve.

It lasts for one look. Whose turn it is, and how much anybody needs, must not enter here.
"""

from __future__ import annotations

from collections.abc import Iterable

from resilient_llm.core.token_bucket import TokenBucket

__all__ = ["KeptLevels"]

_INSTANT = 1e-6
"""Seconds of refill that serve nobody."""


class KeptLevels:
    """Add up what is kept of each bucket."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[TokenBucket, float] = {}

    def keep(self, bucket: TokenBucket, amount: float) -> None:
        """Keep so much more of a bucket."""
        self._kept[bucket] = self._kept.get(bucket, 0.0) + amount

    def leaves(self, charges: Iterable[tuple[TokenBucket, float]], now: float) -> bool:
        """Tell whether enough is left for these charges."""
        kept = self._kept
        return not any(
            bucket in kept and bucket.wait(amount, now, kept[bucket]) for bucket, amount in charges
        )

    def exhausts(self, bucket: TokenBucket, now: float) -> bool:
        """Tell whether all there is of a bucket is kept, but for what floats are no finer than."""
        kept = self._kept.get(bucket)
        return kept is not None and bucket.level(now) - kept <= bucket.rate * _INSTANT
