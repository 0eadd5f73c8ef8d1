"""The things an error reply can mean: the rows of docs/design.md, section 5.

One value for each row, and the row each HTTP status stands in when nothing narrower is known. Names that
providers give their errors are in `codes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from resilient_llm.outcome import CONTEXT_LENGTH_EXCEEDED, Scope, Verdict

__all__ = [
    "CONTENT_FILTER",
    "CONTEXT_LENGTH",
    "CREDENTIAL",
    "DENIED",
    "FAULT",
    "OVERLOADED",
    "REFUSED",
    "THROTTLED",
    "Meaning",
    "meaning_of_status",
    "outcome_unknown",
]


@dataclass(frozen=True, slots=True)
class Meaning:
    """Say whose fault an error is and whether the same target may be asked again."""

    verdict: Verdict
    scope: Scope
    retryable: bool = False
    error_type: str | None = None
    """What it is called whatever the provider calls it, so that a policy can tell it by name."""


FAULT = Meaning(Verdict.FAILURE, Scope.TARGET, retryable=True)
OVERLOADED = Meaning(Verdict.FAILURE, Scope.UPSTREAM, retryable=True)
THROTTLED = Meaning(Verdict.THROTTLED, Scope.TARGET, retryable=True)
CREDENTIAL = Meaning(Verdict.FATAL, Scope.CREDENTIAL)
"""The key is of no use, whatever is asked with it: nothing that a caller's request can bring about by what it asks."""
DENIED = Meaning(Verdict.FATAL, Scope.TARGET)
"""The target does not do this for the key: not that model, file or number of tokens. The key is good for others."""
CONTEXT_LENGTH = Meaning(Verdict.FATAL, Scope.TARGET, error_type=CONTEXT_LENGTH_EXCEEDED)
CONTENT_FILTER = Meaning(Verdict.FATAL, Scope.REQUEST, error_type="content_filter")
REFUSED = Meaning(Verdict.FATAL, Scope.REQUEST)

_STATUSES = {
    401: CREDENTIAL,
    402: CREDENTIAL,
    403: DENIED,  # by a firewall, for a model, for a file ...: of the key only where a name says so
    408: FAULT,
    409: FAULT,  # a lock that was not free in time
    425: FAULT,
    429: THROTTLED,
    501: REFUSED,  # not implemented, and not in a moment either
    505: REFUSED,
    529: OVERLOADED,
}

# The request may have reached a model and been paid for: a gateway lost or stopped waiting for the answer.
# 408 is here because LLM servers say with it that the *model* took too long. 521 and 523 are Cloudflare's
# "refused" and "unreachable", 525 and 526 its failed handshakes: there nothing arrived.
_OUTCOME_UNKNOWN = frozenset({408, 502, 504, 520, 522, 524})


def meaning_of_status(status: int) -> Meaning:
    """Give what an error status means by itself; one without a row is the request's fault below 500."""
    known = _STATUSES.get(status)
    if known is not None:
        return known
    return REFUSED if status < 500 else FAULT


def outcome_unknown(status: int) -> bool:
    """Tell whether a request answered with `status` may have been carried out all the same."""
    return status in _OUTCOME_UNKNOWN
