"""What a client is told of its rate limits with every response.

The fields `RateLimit-Policy` and `RateLimit` of the IETF's draft-ietf-httpapi-ratelimit-headers (structured
fields, as of draft 10). Only how levels are written; what they are, the policies say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from resilient_llm.message import header
from resilient_llm.policies import RateLimit

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.core.quota import LimitLevel
    from resilient_llm.message import Headers

__all__ = ["HeadersOf", "rate_limit_headers"]

HeadersOf: TypeAlias = "Callable[[Call, Headers], Headers]"
"""Gives the headers to add to a response that has some already."""


def rate_limit_headers(policies: Sequence[object]) -> HeadersOf | None:
    """Make the function that tells a call's rate limits; `None` where no policy limits rates."""
    limits = [policy for policy in policies if isinstance(policy, RateLimit)]
    if not limits:
        return None

    def headers_of(call: Call, present: Headers) -> Headers:
        if header(present, b"ratelimit") is not None:  # the app tells of limits of its own
            return []
        levels = [level for limit in limits for level in limit.levels(call)]
        if not levels:
            return []
        return [
            (b"ratelimit-policy", b", ".join(map(_policy, levels))),
            (b"ratelimit", b", ".join(map(_standing, levels))),
        ]

    return headers_of


def _policy(level: LimitLevel) -> bytes:
    unit = "" if level.dimension != "tokens" else ';qu="tokens"'
    return f"{_name(level)};q={math.floor(level.limit)};w={max(1, math.ceil(level.window))}{unit}".encode()


def _standing(level: LimitLevel) -> bytes:
    remaining = max(0, math.floor(level.remaining))
    return f"{_name(level)};r={remaining};t={max(0, math.ceil(level.reset))}".encode()


def _name(level: LimitLevel) -> str:
    words = f"{level.dimension}-{level.scope}"
    return (
        '"'
        + "".join(character for character in words if character.isprintable() and character not in '"\\')
        + '"'
    )
