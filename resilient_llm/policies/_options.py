"""Checks of options, with errors that name the option, its value and what is allowed."""

from __future__ import annotations

import math

from resilient_llm.errors import ConfigurationError

__all__ = ["at_least", "seconds"]


def at_least(least: int, **options: int) -> None:
    """Raise `ConfigurationError` unless every option is a whole number from `least`."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            msg = f"{name}={value!r}: allowed are whole numbers from {least}"
            raise ConfigurationError(msg)


def seconds(*, zero: bool = False, infinite: bool = False, **options: float) -> None:
    """Raise `ConfigurationError` unless every option is a number of seconds above 0 (or from 0)."""
    for name, value in options.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        if not number or value < 0 or (value == 0 and not zero) or (math.isinf(value) and not infinite):
            allowed = "seconds from 0" if zero else "seconds above 0"
            msg = f"{name}={value!r}: allowed are {allowed}{'' if infinite else ', finite'}"
            raise ConfigurationError(msg)
