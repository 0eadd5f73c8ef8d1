"""What is a number, and what is none: comparing another thing would raise an error that names no option."""

from __future__ import annotations

import math
from typing import TypeGuard

__all__ = ["is_count", "is_number"]


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a number, as which neither NaN nor a truth value is one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)
