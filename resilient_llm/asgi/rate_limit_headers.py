"""What a client is told of its rate limits with every response.

The fields `RateLimit-Policy` and `RateLimit` of the IETF's draft-ietf-httpapi-ratelimit-headers (structured
fields, as of draft 10). Only how levels are written; what they are, the policies say.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote

from resilient_llm.message import header
from resilient_llm.policies import RateLimit

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.core.quota import LimitLevel
    from resilient_llm.message import Headers

__all__ = ["HeadersOf", "rate_limit_headers"]

_PLAIN = "".join(set(string.punctuation + " ") - set('"\\%'))

HeadersOf: TypeAlias = "Callable[[Call, Headers], Headers]"
"""Gives the headers to add to a response that has some already."""


def rate_limit_headers(policies: Sequence[object]) -> HeadersOf | None:
    """Make the function that tells a call's rate limits; `None` where no policy limits rates.

    A dry run limits nothing, so nothing is told of it: clients would slow down by themselves.
    """
    limits = [policy for policy in policies if isinstance(policy, RateLimit) and not policy.dry_run]
    if not limits:
        return None
    names: list[bytes] = []

    def headers_of(call: Call, present: Headers) -> Headers:
        if header(present, b"ratelimit") is not None:  # the app tells of limits of its own
            return []
        told = [(limit.name, level) for limit in limits for level in limit.levels(call)]
        if not names:  # the same for every call
            names.extend(_names([(f"{level.dimension}-{level.scope}", policy) for policy, level in told]))
        return [
            (b"ratelimit-policy", b", ".join(_policy(name, level) for name, (_, level) in zip(names, told))),  # noqa: B905
            (b"ratelimit", b", ".join(_standing(name, level) for name, (_, level) in zip(names, told))),  # noqa: B905
        ]

    return headers_of


def _names(words: Sequence[tuple[str, str]]) -> list[bytes]:
    """Name what is told, no two alike, by its own name, then by its policy's, and then by a number."""
    own = Counter(name for name, _ in words)
    longer = [name if own[name] == 1 else f"{name}-{policy}" for name, policy in words]
    return [
        _string(name if name not in longer[:index] else f"{name}-{index + 1}")
        for index, name in enumerate(longer)
    ]


def _policy(name: bytes, level: LimitLevel) -> bytes:
    unit = b"" if level.dimension != "tokens" else b';qu="tokens"'
    return b"%s;q=%d;w=%d%s" % (name, math.floor(level.limit), max(1, math.ceil(level.window)), unit)


def _standing(name: bytes, level: LimitLevel) -> bytes:
    remaining = max(0, math.floor(level.remaining))
    return b"%s;r=%d;t=%d" % (name, remaining, max(0, math.ceil(level.reset)))


def _string(words: str) -> bytes:
    """Write a string of a structured field (RFC 9651, section 3.3.3), which holds printable ASCII alone.

    What cannot stand in it as it is comes as a URL would have it, in percents of its UTF-8.
    """
    return b'"%s"' % quote(words, safe=_PLAIN, errors="replace").encode("ascii")
