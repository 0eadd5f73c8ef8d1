"""Snapshots for those who look: one a second for all of them together, and none while nobody does.

There is no task behind it: whoever looks first in a second makes the snapshot, the others take it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio

if TYPE_CHECKING:
    from resilient_llm.sidecar.ui.shapes import Snapshot

__all__ = ["Live", "TooManyViewersError"]

_WINDOW = 60.0
"""Seconds that rates and shares are taken over."""

_STEP = 5.0
"""Seconds between two of the counts that rates are worked out from."""


class TooManyViewersError(Exception):
    """As many look as may."""


class _Counts(NamedTuple):
    """How far counts had come at some time."""

    at: float
    started: float
    requests: dict[str | None, int]
    attempts: dict[str, int]


class Live:
    """Give snapshots that `take` makes, at most one each `period` seconds, to at most `max_viewers`.

    Shares of traffic and requests per second are added to them: those of the last minute, as far as somebody has
    been looking, or else since the start.
    """

    def __init__(
        self, take: Callable[[], Awaitable[Snapshot]], *, period: float = 1.0, max_viewers: int = 16
    ) -> None:
        self._take = take
        self.period = period
        self._max_viewers = max_viewers
        self._lock = anyio.Lock()
        self._taken_at = -math.inf
        self._snapshot: Snapshot | None = None
        self._counts: deque[_Counts] = deque(maxlen=round(_WINDOW / _STEP) + 1)
        self.viewers = 0
        """How many look now."""
        self.number = 0
        """How many snapshots there were."""

    @property
    def is_full(self) -> bool:
        """Tell whether as many look as may."""
        return self.viewers >= self._max_viewers

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Be one of those who look. Raises `TooManyViewersError`."""
        if self.is_full:
            raise TooManyViewersError
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1

    async def latest(self) -> Snapshot:
        """Give a snapshot that is less than a period old."""
        async with self._lock:
            now = anyio.current_time()
            if self._snapshot is None or now - self._taken_at >= self.period * 0.9:
                snapshot = await self._take()
                self._rate(snapshot, now)
                self._snapshot, self._taken_at = snapshot, now
                self.number += 1
            return self._snapshot

    def _rate(self, snapshot: Snapshot, now: float) -> None:
        """Add how fast counts have gone up."""
        counts = _Counts(
            now,
            snapshot["started"],
            {row["name"]: row["requests"] for row in snapshot["tenants"]},
            {row["name"]: row["attempts"] for row in snapshot["targets"]},
        )
        known = self._counts
        while known and (known[0].at < now - _WINDOW - _STEP or known[0].started != counts.started):
            known.popleft()  # of another minute, or of processes that are no more
        if known:
            then = known[0]
            seconds = max(now - then.at, 1e-3)
        else:
            then = _Counts(now, counts.started, {}, {})
            seconds = max(snapshot["at"] - snapshot["started"], 1.0)
        for tenant in snapshot["tenants"]:
            tenant["per_second"] = max(0, tenant["requests"] - then.requests.get(tenant["name"], 0)) / seconds
        came = {name: max(0, count - then.attempts.get(name, 0)) for name, count in counts.attempts.items()}
        whole = sum(came.values())
        if not whole:  # nothing came meanwhile
            came, whole = counts.attempts, sum(counts.attempts.values())
        for target in snapshot["targets"]:
            target["share"] = came[target["name"]] / whole if whole else None
        if not known or now - known[-1].at >= _STEP:
            known.append(counts)
