"""Keep whatever goes wrong in telemetry away from the call.

An application's span processor, sampler, reader or propagator may raise anything at any time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

__all__ = ["quiet", "report"]

logger = logging.getLogger("resilient_llm")

_P = ParamSpec("_P")
_S = TypeVar("_S")
_reported: set[tuple[str, type[Exception]]] = set()


def report(where: str, error: Exception) -> None:
    """Log a failure of telemetry: the first of its kind with its traceback, the rest at level DEBUG.

    A processor that fails does so for every span, and logging each would slow the calls it is kept from.
    """
    kind = (where, type(error))
    if kind in _reported:
        logger.debug("telemetry failed again in %s: %s", where, type(error).__name__)
        return
    _reported.add(kind)
    logger.warning("telemetry failed in %s; calls go on without it", where, exc_info=error)


def quiet(method: Callable[Concatenate[_S, _P], None]) -> Callable[Concatenate[_S, _P], None]:
    """Make a method report what it raises instead of raising it."""

    @functools.wraps(method)
    def guarded(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the call's
            report(method.__qualname__, error)

    return guarded
