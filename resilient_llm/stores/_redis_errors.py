"""What an error of a Redis or Valkey server means, in a few words, and whether anything can have come of the command.

What is done about it must not enter here.
"""

from __future__ import annotations

from typing import Final

from redis.exceptions import (
    BusyLoadingError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

__all__ = ["describe", "never_executed"]

_NOT_NOW: Final = (
    BusyLoadingError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
)
_NOT_NOW_CODES: Final = ("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN")
"""What a server says before it has changed anything, and may not say the next time."""


def describe(error: BaseException) -> str:
    """Say what happened, for errors and logs."""
    return f"{type(error).__name__}: {error}"[:200]


def _never_connected(error: BaseException | None) -> bool:
    """Tell whether nothing can have reached the server."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def never_executed(error: BaseException) -> bool:
    """Tell whether a command that failed so has certainly changed nothing, and may be sent again."""
    if isinstance(error, ResponseError) and str(error).startswith(_NOT_NOW_CODES):
        return True
    return isinstance(error, _NOT_NOW) or _never_connected(error)
