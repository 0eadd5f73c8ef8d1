"""What an error of a Redis or Valkey server means, in a few words, and whether anything can have come of the command.

What is done about it must not enter here.
"""

from __future__ import annotations

import asyncio
from typing import Final

from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from resilient_llm.stores._redis_commands import Request

__all__ = ["NeverSentError", "describe", "is_proof", "is_unknown", "never_executed", "refuses_writes"]


class NeverSentError(RedisError):
    """There was no connection to send anything over; the text says what happened in its place."""


_NOT_NOW: Final = (
    AskError,  # of which MovedError is one
    BusyLoadingError,
    ClusterDownError,
    NeverSentError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)
_NOT_NOW_CODES: Final = ("BUSY", "MISCONF", "NOREPLICAS")
"""What a server says before it has changed anything, and may not say the next time."""

_NO_WRITES: Final = (OutOfMemoryError, ReadOnlyError)
_NO_WRITES_CODES: Final = ("MISCONF", "NOREPLICAS")
_NEED_NO_MEMORY: Final = frozenset({"DEL", "GET", "circuit_read", "lease_release", "value_get"})


def describe(error: BaseException) -> str:
    """Say what happened, for errors and logs."""
    if isinstance(error, asyncio.CancelledError):
        return "it was closed meanwhile"
    if isinstance(error, NeverSentError):
        return str(error)
    if isinstance(error, MovedError):
        return f"{type(error).__name__}: {error} (a server of a cluster: give the store a RedisCluster)"
    return f"{type(error).__name__}: {error}"[:200]


def never_executed(error: BaseException) -> bool:
    """Tell whether a command that failed so has certainly changed nothing, and may be sent again."""
    if isinstance(error, ResponseError) and str(error).startswith(_NOT_NOW_CODES):
        return True
    return isinstance(error, _NOT_NOW)


def is_unknown(error: BaseException) -> bool:
    """Tell whether nobody can say what came of a command: the server has neither answered nor refused."""
    return not isinstance(error, ResponseError) and not never_executed(error)


def refuses_writes(error: BaseException) -> bool:
    """Tell whether a server has said that it takes nothing more, which it may say while it answers to other things."""
    if isinstance(error, ResponseError) and str(error).startswith(_NO_WRITES_CODES):
        return True
    return isinstance(error, _NO_WRITES)


def is_proof(request: Request) -> bool:
    """Tell whether that a request was answered shows that the server can be written to."""
    name = request.words[0] if request.script is None else request.script.name
    return name not in _NEED_NO_MEMORY
