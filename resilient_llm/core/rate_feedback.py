"""What a provider's replies teach about its limits, applied to the buckets that mirror them.

The provider may only lower a level, never raise one. Reading its headers is `ratelimit_headers`'; which buckets mirror
its limits, the policy says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from resilient_llm.core.quota import Reservation
from resilient_llm.core.ratelimit_headers import Level

__all__ = ["LONGEST_PAUSE", "Mirrored", "learn", "learn_refusal"]

Mirrored: TypeAlias = Mapping[str, Sequence[int]]
"""Which of a reservation's charges mirror the provider's limit on `requests`, and which that on `tokens`."""

LONGEST_PAUSE = 120.0
"""The longest that anything a provider says keeps calls back; then one of them finds out."""

_MINUTE = 60.0
_TOLERANCE = 0.1
_SHORT = 2.0
"""Seconds of a reset not worth a pause: headers round to whole ones, and the refill takes about as long."""

_DIMENSIONS: Mapping[str, str] = {
    "requests": "requests",
    "tokens": "tokens",
    "input_tokens": "tokens",
    "output_tokens": "tokens",
}


def learn(
    levels: Iterable[Level],
    reservation: Reservation,
    mirrored: Mirrored,
    now: float,
    *,
    refused: bool = False,
) -> None:
    """Lower levels to what a reply says remains.

    The reply speaks of the moment its request was admitted: what was taken here since is taken off, and what was
    refilled since is added (`reservation` must be marked). Where nothing remains, and the reset says that the limit
    comes back all at once, nothing is granted until then. `refused` says that the reply was a refusal with no better
    word on when to come back. A level that does not say what remains changes nothing.
    """
    for level in levels:
        if level.remaining is None or (level.dimension.endswith("put_tokens") and level.remaining):
            continue  # a bucket of all tokens says nothing of what is left of one kind, until that is nothing
        charges = mirrored.get(_DIMENSIONS[level.dimension], ())
        buckets = [reservation.charges[index][0] for index in charges]
        pause = _pause(level, 0.0 if refused else max([_SHORT, *(b.capacity / b.rate for b in buckets)]))
        for index, bucket in zip(charges, buckets, strict=True):
            taken = bucket.spent_since(reservation.marks[index])
            refilled = bucket.rate * max(0.0, now - reservation.taken_at)
            bucket.lower(level.remaining + refilled - taken, now)
            if pause:
                bucket.pause(now + pause)


def learn_refusal(
    levels: Sequence[Level],
    reservation: Reservation,
    mirrored: Mirrored,
    now: float,
    *,
    retry_after: float | None,
) -> None:
    """Empty what refused a request (429), and grant nothing of it before `retry_after`, in seconds.

    Those are the buckets of which nothing remains, or all of them where the reply marks none and says when to come
    back.
    """
    exhausted = {_DIMENSIONS[level.dimension] for level in levels if level.remaining == 0}
    if not exhausted and retry_after is None:
        return
    for dimension, charges in mirrored.items():
        if exhausted and dimension not in exhausted:
            continue
        for index in charges:
            bucket = reservation.charges[index][0]
            bucket.lower(0.0, now)
            if retry_after is not None:
                bucket.pause(now + min(retry_after, LONGEST_PAUSE))


def _pause(level: Level, refill: float) -> float:
    """Say for how many seconds a limit of which nothing remains gives nothing.

    Most providers mean by a reset the moment the bucket is full again, and go on refilling: no pause. An empty bucket
    names what filling it takes: a minute, or as much less as one request takes that the rounding hides; where the
    limit is enforced in shorter steps, a second or ten. So up to `refill` seconds, which our own bucket takes to fill,
    a reset is taken for a refill; should it be the end of a window, which comes back all at once, a refusal will tell.
    Other resets are the ends of windows, or of limits on more than a minute.
    """
    if level.remaining or not level.reset or level.reset <= refill * (1 + _TOLERANCE):
        return 0.0
    hidden = _MINUTE / level.limit if level.limit else 0.0
    if (_MINUTE - hidden) * (1 - _TOLERANCE) <= level.reset <= _MINUTE * (1 + _TOLERANCE):
        return 0.0
    return min(level.reset, LONGEST_PAUSE)
