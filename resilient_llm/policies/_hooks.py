"""What goes wrong in the functions that an application gives to policies: said in the log, and never a call's trouble.

A function that fails does so for every call, and a traceback for each would bury all else. What is done in place of
what the function should have given is for its policy to say.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

__all__ = ["hook_failed", "hook_gave"]

logger = logging.getLogger("resilient_llm")

_said: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def hook_failed(option: str, function: object, error: Exception, *, instead: str = "") -> None:
    """Log that a function failed: the first time of a kind with its traceback, then in a line at level DEBUG."""
    after = f"; {instead}" if instead else ""
    if _is_new(function, f"{option} {type(error).__name__}"):
        logger.error("%s=%r failed%s", option, function, after, exc_info=error)
    else:
        logger.debug("%s=%r failed again: %s%s", option, function, type(error).__name__, after)


def hook_gave(option: str, function: object, value: object, allowed: str, *, instead: str = "") -> None:
    """Log that a function gave what it must not: the first time as an error, then at level DEBUG."""
    level = logging.ERROR if _is_new(function, option) else logging.DEBUG
    after = f"; {instead}" if instead else ""
    logger.log(level, "%s=%r gave %r: allowed are %s%s", option, function, value, allowed, after)


def _is_new(function: object, kind: str) -> bool:
    """Tell whether this is the first time that this is said of a function; of a method, whatever its object."""
    function = getattr(function, "__func__", function)
    try:
        said = _said.setdefault(function, set())
    except TypeError:  # no weak reference to it, or not hashable
        said = _said.setdefault(type(function), set())
    if kind in said:
        return False
    said.add(kind)
    return True
