"""What a row of a dialect's table of streams holds: the stream, and all that is to be read in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from resilient_llm.outcome import Scope, Usage, Verdict
from resilient_llm.providers import Dialect

SUCCESS = (Verdict.SUCCESS, Scope.TARGET, None)
TRUNCATED = (Verdict.FAILURE, Scope.TARGET, "truncated")
EMPTY = (Verdict.FAILURE, Scope.TARGET, "empty_stream")

Row = tuple[Verdict, Scope, str | None]


@dataclass(frozen=True, kw_only=True)
class Example:
    """Say what is read in one stream, whatever its reads are."""

    name: str
    dialect: Dialect
    stream: bytes
    kinds: str
    """One letter for each event that ends with a blank line: of its kind, or `!` for an error."""
    outcome: Row = SUCCESS
    usage: Usage | None = None
    model: str | None = None
    id: str | None = None
    finish_reasons: tuple[str, ...] = ()
    status: int | None = None
    """The outcome's, of a failure that names one."""
    retryable: bool = True
    """Of a failure."""
    text: str | None = ""
    malformed: int = 0
    keepalives: int = 0

    def __str__(self) -> str:
        return f"{self.dialect.name}: {self.name}"


def sse(data: Any, event: str | None = None) -> bytes:
    """Write one event as providers do."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


def tokens(
    read: int | None,
    written: int | None,
    *,
    cached: int | None = None,
    reasoning: int | None = None,
    estimated: bool = False,
) -> Usage:
    """Count tokens."""
    return Usage(
        input_tokens=read,
        output_tokens=written,
        cached_tokens=cached,
        reasoning_tokens=reasoning,
        estimated=estimated,
    )
