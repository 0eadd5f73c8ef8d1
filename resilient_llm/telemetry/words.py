"""The words that say in a trace how a call or an attempt ended, and which of them are errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from resilient_llm.outcome import Outcome, Scope, Verdict

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = [
    "ATTEMPT_ERRORS",
    "CALL_ERRORS",
    "AttemptOutcome",
    "CallOutcome",
    "attempt_outcome",
    "call_outcome",
    "error_type",
]

CallOutcome: TypeAlias = Literal[
    "success", "fallback", "failed", "exhausted", "rejected", "timeout", "cancelled", "truncated"
]
AttemptOutcome: TypeAlias = Literal["success", "retryable", "fatal", "timeout", "cancelled"]

CALL_ERRORS: Final[frozenset[CallOutcome]] = frozenset(
    {"failed", "exhausted", "rejected", "timeout", "truncated"}
)
ATTEMPT_ERRORS: Final[frozenset[AttemptOutcome]] = frozenset({"retryable", "fatal", "timeout"})


def call_outcome(call: Call, outcome: Outcome) -> CallOutcome:
    """Give the word for how a call ended."""
    if outcome.ok:
        return "fallback" if call.fallbacks else "success"
    if outcome.error_type == "deadline_exceeded":
        return "timeout"
    if outcome.error_type == "cancelled":
        return "cancelled"
    if outcome.verdict is Verdict.NEUTRAL and outcome.scope is Scope.LOCAL:
        return "rejected"
    if outcome.error_type == "truncated":
        return "truncated"
    return "exhausted" if call.exhausted else "failed"


def attempt_outcome(outcome: Outcome) -> AttemptOutcome:
    """Give the word for how an attempt ended."""
    if outcome.ok:
        return "success"
    if outcome.timed_out:
        return "timeout"
    if outcome.verdict is Verdict.NEUTRAL and not outcome.retryable:
        return "cancelled"
    return "retryable" if outcome.retryable else "fatal"


def error_type(outcome: Outcome) -> str:
    """Give `error.type`; the conventions' `_OTHER` where nothing better is known."""
    return outcome.error_type or "_OTHER"
