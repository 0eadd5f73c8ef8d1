"""What a failed reply says about trying again: how long to wait, and whether to try at all.

Reads headers and an error body that somebody else has parsed. Whether the wait fits a cap, a deadline or a
budget is decided in `Retry`, and what the failure means in `providers/`; neither enters here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal, TypeAlias

from resilient_llm.core.ratelimit_headers import (
    Bucket,
    Headers,
    decimal,
    duration,
    http_date,
    read_buckets,
    server_time,
)

__all__ = ["Hint", "HintSource", "retry_hint", "should_retry"]

HintSource: TypeAlias = Literal["retry-after-ms", "retry-after", "ratelimit-reset", "body"]

_PROTOBUF_DURATION = re.compile(r"([0-9]+(?:\.[0-9]{1,9})?)s")
_RETRY_INFO = "google.rpc.RetryInfo"


@dataclass(frozen=True, slots=True)
class Hint:
    """Say how long the server wants its caller to stay away, in seconds, and where it said so.

    `delay` is a floor: 0 sets none, so the caller's own backoff applies; `math.inf` is a number too long for
    any cap. A `"ratelimit-reset"` is weaker than the others: most providers mean by it the moment the bucket
    is *full* again, which bounds the wait from above, so it counts only within the cap and the deadline.
    """

    delay: float
    source: HintSource


def retry_hint(headers: Headers, *, status: int, wall_now: float, body: object = None) -> Hint | None:
    """Read when to come back from a failed reply, `None` when it does not say.

    In this order, the first that is well-formed: `retry-after-ms`; `retry-after` in seconds, as a date or, against
    the RFC, as a duration (`1m30s`); the rate-limit reset of the bucket that refused; Gemini's `retryDelay` in the
    parsed error `body`.
    A past date is 0. Anything outside the grammar (a sign, `nan`, a list) counts as absent and never raises.
    When one header comes twice the longer wait counts, so no sender is called before it said.

    `status` is the effective one: pass the error's when a 200 carries an error in its body. Below 400 there
    is never a hint. `wall_now`, in epoch seconds, stands in for a missing `Date` of the reply.

    Source: RFC 9110, section 10.2.3; google.rpc.RetryInfo; the providers' pages on rate limits.
    """
    if status < HTTPStatus.BAD_REQUEST:
        return None
    milliseconds, seconds = [], []
    for name, raw_value in headers:
        header = name.lower()
        if header == b"retry-after":
            seconds.append(_retry_after(raw_value.strip(b" \t"), headers, wall_now))
        elif header == b"retry-after-ms":
            milliseconds.append(decimal(raw_value.strip(b" \t")))
    delay = _longest(milliseconds)
    if delay is not None:
        return Hint(delay / 1000, "retry-after-ms")
    delay = _longest(seconds)
    if delay is not None:
        return Hint(delay, "retry-after")
    throttled = status == HTTPStatus.TOO_MANY_REQUESTS
    delay = _refusing_reset(read_buckets(headers, wall_now), throttled=throttled)
    if delay is not None:
        return Hint(delay, "ratelimit-reset")
    delay = _retry_delay(body)
    if delay is not None:
        return Hint(delay, "body")
    return None


def should_retry(headers: Headers) -> bool | None:
    """Read `x-should-retry`, in any case: `True`, `False`, or `None` when it says neither.

    Where it is repeated and disagrees, `False` counts.
    """
    verdict = None
    for name, value in headers:
        if name.lower() == b"x-should-retry":
            answer = value.strip(b" \t").lower()
            if answer == b"false":
                return False
            if answer == b"true":
                verdict = True
    return verdict


def _retry_after(value: bytes, headers: Headers, wall_now: float) -> float | None:
    seconds = decimal(value)
    if seconds is not None:
        return seconds
    now = server_time(headers, wall_now)
    date = http_date(value, now)
    return duration(value) if date is None else max(0.0, date - now)


def _refusing_reset(buckets: list[Bucket], *, throttled: bool) -> float | None:
    """Give the latest reset of the buckets that may have refused the request.

    Those are the exhausted ones. When a 429 marks none, it was a token bucket with too little left for this
    request, or one that does not say what is left; a request bucket with anything left let it through.
    """
    exhausted = [bucket for bucket in buckets if bucket.remaining == 0]
    if exhausted:
        return _longest(bucket.reset for bucket in exhausted)
    if not throttled:
        return None
    return _longest(bucket.reset for bucket in buckets if bucket.remaining is None or _counts_tokens(bucket))


def _counts_tokens(bucket: Bucket) -> bool:
    return b"token" in bucket.name or bucket.dimension not in (None, "requests")


def _retry_delay(body: object) -> float | None:
    """Read google.rpc.RetryInfo out of a Gemini error, which may come wrapped in a list."""
    if isinstance(body, list) and body:
        body = body[0]
    error = body.get("error") if isinstance(body, Mapping) else None
    details = error.get("details") if isinstance(error, Mapping) else None
    if not isinstance(details, list):
        return None
    return _longest(_retry_info(detail) for detail in details)


def _retry_info(detail: object) -> float | None:
    if not isinstance(detail, Mapping):
        return None
    kind, duration = detail.get("@type"), detail.get("retryDelay")
    if not (isinstance(kind, str) and kind.endswith(_RETRY_INFO) and isinstance(duration, str)):
        return None
    match = _PROTOBUF_DURATION.fullmatch(duration)
    return None if match is None else decimal(match[1].encode())


def _longest(delays: Iterable[float | None]) -> float | None:
    return max((delay for delay in delays if delay is not None), default=None)
