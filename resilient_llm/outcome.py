"""What a finished attempt or call meant.

Plain values that `providers` produce and policies decide by. Nothing here looks at a reply,
a header or an exception; that is the providers' job.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Outcome", "Scope", "Usage", "Verdict"]


class Verdict(Enum):
    """Say what a finished attempt or call meant."""

    SUCCESS = "success"
    FAILURE = "failure"
    """It may work another time: a server error, a lost connection, a cut body, a timeout."""
    THROTTLED = "throttled"
    """The target is healthy and asks to be called later (429)."""
    FATAL = "fatal"
    """Trying the same thing again is useless."""
    NEUTRAL = "neutral"
    """It says nothing about the target: cancelled, or refused on this side."""


_SUCCESS = (
    Verdict.SUCCESS
)  # asked for many times a call; through its class it costs eight times a global on 3.11


class Scope(Enum):
    """Say whose fault an outcome is."""

    REQUEST = "request"
    CREDENTIAL = "credential"
    TARGET = "target"
    UPSTREAM = "upstream"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Count the tokens a reply reported; `None` is unknown, which is not zero."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Part of `input_tokens` that was read from the provider's prompt cache."""
    reasoning_tokens: int | None = None
    """Part of `output_tokens` that was thinking."""
    estimated: bool = False

    @property
    def total_tokens(self) -> int | None:
        """Add input and output tokens; `None` while either is unknown."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Describe how an attempt or a call ended.

    `retry_after` is in seconds from the moment the reply arrived and is a floor: `None` when the
    provider gave no hint, `math.inf` when the hint was over every cap. `error_type` is of low
    cardinality: a provider's error code, a status, or the name of an exception class.
    """

    verdict: Verdict
    scope: Scope = Scope.TARGET
    error_type: str | None = None
    status: int | None = None
    retryable: bool = False
    """Whether the same target may be asked again."""
    retry_after: float | None = None
    retry_after_source: str | None = None
    ambiguous: bool = False
    """The request may have been carried out, and billed, although no complete answer came back."""
    usage: Usage | None = None
    answered: bool = False
    """An answer says this of itself, a blocked prompt or a response that failed: its 2xx is meant, and its caller's."""

    @property
    def ok(self) -> bool:
        """Tell whether this was a success."""
        return self.verdict is _SUCCESS

    @property
    def silent(self) -> bool:
        """Tell whether the target gave no answer in its time: asking it the same again would only take as long."""
        return self.error_type in SILENCE_TYPES

    @property
    def context_exceeded(self) -> bool:
        """Tell whether the request is longer than the model's context window."""
        return self.error_type == CONTEXT_LENGTH_EXCEEDED

    @property
    def dead_credential(self) -> bool:
        """Tell whether the credential is at fault: unknown, forbidden, or out of money."""
        return self.verdict is Verdict.FATAL and self.scope is Scope.CREDENTIAL

    @property
    def fails_over(self) -> bool:
        """Tell whether another target may succeed where this one did not."""
        if self.scope in (Scope.REQUEST, Scope.LOCAL):
            return False
        return self.verdict in (Verdict.FAILURE, Verdict.THROTTLED, Verdict.FATAL)

    @property
    def timed_out(self) -> bool:
        """Tell whether a clock ended it."""
        return self.error_type in TIMEOUT_TYPES


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

SILENCE_TYPES = frozenset({"first_content_timeout", "headers_timeout", "read_timeout", "timeout"})

TIMEOUT_TYPES = frozenset(
    {
        "connect_timeout",
        "content_gap_timeout",
        "deadline_exceeded",
        "first_content_timeout",
        "headers_timeout",
        "pool_timeout",
        "read_timeout",
        "timeout",
        "write_timeout",
    }
)

SUCCESS = Outcome(verdict=Verdict.SUCCESS)
CANCELLED = Outcome(verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type="cancelled")
DEADLINE_EXCEEDED = Outcome(verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type="deadline_exceeded")
