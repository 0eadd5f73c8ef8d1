"""What rate-limit headers say: how much is left in which bucket, and when it is full again.

Holds the grammar of their values (decimals, durations, dates) and the families of their names. Headers only:
what a failed reply asks of its caller is `hints`, and what to do about either is a policy's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, TypeAlias

__all__ = [
    "Bucket",
    "Dimension",
    "Headers",
    "Level",
    "decimal",
    "duration",
    "http_date",
    "rate_limit_levels",
    "read_buckets",
    "server_time",
]

Headers: TypeAlias = Collection[tuple[bytes, bytes]]
Dimension: TypeAlias = Literal["requests", "tokens", "input_tokens", "output_tokens"]
_Kind: TypeAlias = Literal["limit", "remaining", "reset", "unit", "quotas"]

_DIMENSIONS: dict[bytes, Dimension] = {
    b"": "requests",  # `x-ratelimit-remaining` and `ratelimit-remaining`
    b"requests": "requests",
    b"requests-minute": "requests",
    b"req-minute": "requests",  # Mistral
    b"tokens": "tokens",
    b"tokens-minute": "tokens",  # Mistral, Cerebras
    b"project-tokens": "tokens",  # OpenAI, where a project has a limit of its own
    b"input-tokens": "input_tokens",  # Anthropic
    b"output-tokens": "output_tokens",  # Anthropic
}
_KINDS: dict[bytes, _Kind] = {b"limit": "limit", b"remaining": "remaining", b"reset": "reset"}
_QUOTA_PARAMETERS: dict[bytes, _Kind] = {b"q": "limit", b"r": "remaining", b"t": "reset", b"qu": "unit"}

_X_RATELIMIT = re.compile(rb"(x-ratelimit|ratelimit)-(limit|remaining|reset)(?:-(.+))?")
_ANTHROPIC = re.compile(rb"(anthropic-ratelimit)-(.+)-(limit|remaining|reset)")
_LONGEST_NAME = 80
_QUOTA = re.compile(rb'"([^"\\]*)"((?:[ \t]*;[ \t]*[a-z]+=(?:"[^"\\]*"|[^;" \t]+))+)')

_DECIMAL = re.compile(rb"[0-9]+(?:\.[0-9]+)?")
_COUNT = re.compile(rb"[0-9]{1,15}")
_DURATION = re.compile(rb"(?:[0-9]+(?:\.[0-9]+)?(?:h|ms|m|s|us|\xc2\xb5s|ns))+")
_DURATION_PART = re.compile(rb"([0-9.]+)([^0-9.]+)")
_UNITS = {b"h": 3600.0, b"m": 60.0, b"s": 1.0, b"ms": 1e-3, b"us": 1e-6, b"\xc2\xb5s": 1e-6, b"ns": 1e-9}
_RFC3339 = re.compile(
    rb"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?(?:Z|[+-][0-9]{2}:[0-5][0-9])"
)
_OVERLONG = 1e15
"""More seconds than any cap, and more digits than a float holds exactly."""
_FIRST_EPOCH_SECOND = 1e9
"""A smaller number is a duration: as an instant it lies before September 2001."""
_FIRST_EPOCH_MILLISECOND = 1e11
"""A smaller number is in seconds: as milliseconds it lies before 1973, as seconds after the year 5000."""

_MONTHS = (b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec")
_MONTH = rb"(?P<month>" + b"|".join(_MONTHS) + rb")"
_WEEKDAY = rb"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_WHOLE_WEEKDAY = rb"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_TIME = rb"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_IMF_FIXDATE = re.compile(
    _WEEKDAY + rb", (?P<day>[0-9]{2}) " + _MONTH + rb" (?P<year>[0-9]{4}) " + _TIME + rb" GMT"
)
_RFC850 = re.compile(
    _WHOLE_WEEKDAY + rb", (?P<day>[0-9]{2})-" + _MONTH + rb"-(?P<year>[0-9]{2}) " + _TIME + rb" GMT"
)
_ASCTIME = re.compile(
    _WEEKDAY + rb" " + _MONTH + rb" (?P<day>[0-9]{2}| [0-9]) " + _TIME + rb" (?P<year>[0-9]{4})"
)
_LEAP_SECOND = 60


@dataclass(frozen=True, slots=True)
class Level:
    """Say what a provider reports of one of its limits.

    `limit` and `remaining` count requests or tokens, `None` when not stated. `reset` is in seconds from now,
    `None` when not stated, `math.inf` when beyond any wait; most providers mean by it the moment the bucket
    is *full* again, so it bounds a wait from above. Only the provider knows the window (a minute, a day).
    """

    dimension: Dimension
    limit: int | None
    remaining: int | None
    reset: float | None


@dataclass(slots=True)
class Bucket:
    """Collect the headers of one limit under the provider's own name for it."""

    name: bytes
    dimension: Dimension | None
    limit: int | None = None
    remaining: int | None = None
    reset: float | None = None
    unlimited: bool = False
    """A negative number was sent, as Azure does for "no quota here"; the rest means nothing then."""


def rate_limit_levels(headers: Headers, wall_now: float) -> tuple[Level, ...]:
    """Read the limits a reply of any status reports, in the order of their first headers.

    Understands `x-ratelimit-*` (OpenAI, Azure, Groq, Mistral ...), `anthropic-ratelimit-*`, and the IETF's
    `RateLimit` and `RateLimit-*`. Each limit gives one level, so several may share a dimension. One that is
    negative ("unknown"), or that states neither a limit nor a remainder, is left out.
    `wall_now`, in epoch seconds, is for absolute resets when the reply has no valid `Date`.

    Source: the providers' pages on rate limits; draft-ietf-httpapi-ratelimit-headers-06, -07 and -10.
    """
    # Most replies of most servers have none, and one search is four times faster than thirty.
    if b"ratelimit" not in b"\n".join([name for name, _ in headers]).lower():
        return ()
    return tuple(
        Level(bucket.dimension, bucket.limit, bucket.remaining, bucket.reset)
        for bucket in read_buckets(headers, wall_now)
        if bucket.dimension is not None and not (bucket.limit is None and bucket.remaining is None)
    )


def read_buckets(headers: Headers, wall_now: float) -> list[Bucket]:
    """Gather rate-limit headers into buckets, those with unknown names too.

    Of a header sent twice the stricter value counts: the lower number, the later reset.
    """
    buckets: dict[tuple[bytes, bytes], Bucket] = {}
    now: float | None = None
    for family, name, kind, value in _fields(headers):
        bucket = buckets.get((family, name))
        if bucket is None:
            # An IETF policy may have any name, and counts requests unless it says otherwise.
            dimension = _DIMENSIONS.get(name, "requests" if family == b"quota" else None)
            bucket = buckets[family, name] = Bucket(name, dimension)
        if kind == "reset":
            reset = _seconds(value)
            if reset is None and (instant := _instant(value)) is not None:
                now = server_time(headers, wall_now) if now is None else now
                reset = max(0.0, instant - now)
            if reset is not None and (bucket.reset is None or reset > bucket.reset):
                bucket.reset = reset
        elif kind == "unit":
            bucket.dimension = _DIMENSIONS.get(value.strip(b'"'))
        elif value.startswith(b"-"):
            bucket.unlimited = True
        elif _COUNT.fullmatch(value):
            count = int(value)
            if kind == "limit":
                bucket.limit = count if bucket.limit is None else min(count, bucket.limit)
            else:
                bucket.remaining = count if bucket.remaining is None else min(count, bucket.remaining)
    return [bucket for bucket in buckets.values() if not bucket.unlimited]


def _fields(headers: Headers) -> Iterator[tuple[bytes, bytes, _Kind, bytes]]:
    """Give family, bucket, kind and value of each rate-limit header, or of each part of one."""
    for header, raw_value in headers:
        field = _field(header) if len(header) <= _LONGEST_NAME else None
        if field is not None:
            family, name, kind = field
            value = raw_value.strip(b" \t")
            if kind == "quotas":
                yield from _quotas(value)
            else:
                yield family, name, kind, value


@lru_cache(maxsize=256)  # a provider sends the same dozen names with every reply
def _field(header: bytes) -> tuple[bytes, bytes, _Kind] | None:
    """Tell from a header's name its family, bucket and kind; `None` when it is about something else."""
    header = header.lower()
    if match := _X_RATELIMIT.fullmatch(header):
        return match[1], match[3] or b"", _KINDS[match[2]]
    if match := _ANTHROPIC.fullmatch(header):
        return match[1], match[2], _KINDS[match[3]]
    if header in (b"ratelimit", b"ratelimit-policy"):
        return b"quota", b"", "quotas"
    return None


def _quotas(value: bytes) -> Iterator[tuple[bytes, bytes, _Kind, bytes]]:
    """Take apart `"name";r=50;t=30` (draft 08 on) and `limit=100, remaining=50, reset=30` (draft 07)."""
    for part in value.split(b","):
        item = part.strip(b" \t")
        if match := _QUOTA.fullmatch(item):
            for parameter in match[2].split(b";"):
                key, _, number = parameter.strip(b" \t").partition(b"=")
                if key in _QUOTA_PARAMETERS:
                    yield b"quota", match[1].lower(), _QUOTA_PARAMETERS[key], number
        else:
            key, _, number = item.partition(b"=")
            if key in _KINDS:
                yield b"quota", b"", _KINDS[key], number


def _seconds(value: bytes) -> float | None:
    """Read plain seconds, or a duration as Go writes it: `17ms`, `6m0s`, `1h30m`."""
    number = decimal(value)
    if number is not None:
        return number if number < _FIRST_EPOCH_SECOND or number == math.inf else None
    return duration(value)


def _instant(value: bytes) -> float | None:
    """Read epoch seconds, epoch milliseconds (OpenRouter) or RFC 3339 as epoch seconds."""
    number = decimal(value)
    if number is not None:
        return number if number < _FIRST_EPOCH_MILLISECOND else number / 1000
    text = value.upper()
    if not _RFC3339.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text.decode()).timestamp()
    except ValueError:
        return None


def decimal(value: bytes) -> float | None:
    """Read ASCII digits with an optional fraction; `math.inf` when overlong, `None` for anything else."""
    if not _DECIMAL.fullmatch(value):
        return None
    number = float(value)
    return number if number < _OVERLONG else math.inf


def duration(value: bytes) -> float | None:
    """Read a duration as Go writes it, in seconds; `math.inf` when overlong, `None` for anything else."""
    if not _DURATION.fullmatch(value):
        return None
    total = sum(float(amount) * _UNITS[unit] for amount, unit in _DURATION_PART.findall(value))
    return total if total < _OVERLONG else math.inf


def http_date(value: bytes, now: float) -> float | None:
    """Read an HTTP date as epoch seconds: IMF-fixdate, RFC 850 or asctime; `None` when it is none of them.

    A two-digit year is the one that is at most 50 years after `now`. Weekdays must exist but need not agree.

    Source: RFC 9110, section 5.6.7.
    """
    match = _IMF_FIXDATE.fullmatch(value) or _RFC850.fullmatch(value) or _ASCTIME.fullmatch(value)
    if match is None:
        return None
    day, year, hour, minute, second = map(int, match.group("day", "year", "hour", "minute", "second"))
    if match.re is _RFC850:
        earliest = datetime.fromtimestamp(now, UTC).year - 49
        year = earliest + (year - earliest) % 100
    if second == _LEAP_SECOND:
        second -= 1
    try:
        return datetime(
            year, _MONTHS.index(match["month"]) + 1, day, hour, minute, second, tzinfo=UTC
        ).timestamp()
    except ValueError:
        return None


def server_time(headers: Headers, wall_now: float) -> float:
    """Give the epoch time a reply was sent by its own `Date`, or `wall_now` where that is missing or invalid.

    A date in a reply and its `Date` come from one clock, so their difference is right however wrong ours is.
    """
    for name, value in headers:
        if name.lower() == b"date":
            sent = http_date(value.strip(b" \t"), wall_now)
            if sent is not None:
                return sent
    return wall_now
