"""Checks of options, with errors that name the option, its value and what is allowed."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeGuard

from resilient_llm.errors import ConfigurationError

__all__ = [
    "at_least",
    "flag",
    "function",
    "instance_of",
    "is_number",
    "label",
    "names",
    "number",
    "offers",
    "one_of",
    "seconds",
    "store_of",
    "synchronous",
    "takes",
]

_TOO_LARGE = int(sys.float_info.max)


def at_least(least: int, **options: int) -> None:
    """Raise `ConfigurationError` unless every option is a whole number from `least`."""
    for name, value in options.items():
        if not isinstance(value, int) or not is_number(value) or value < least:
            msg = f"{name}={value!r}: allowed are whole numbers from {least}"
            raise ConfigurationError(msg)


def seconds(*, zero: bool = False, infinite: bool = False, **options: float) -> None:
    """Raise `ConfigurationError` unless every option is a number of seconds above 0 (or from 0)."""
    for name, value in options.items():
        if (
            not is_number(value)
            or value < 0
            or (value == 0 and not zero)
            or (value == math.inf and not infinite)
        ):
            allowed = "seconds from 0" if zero else "seconds above 0"
            msg = f"{name}={value!r}: allowed are {allowed}{'' if infinite else ', finite'}"
            raise ConfigurationError(msg)


def number(
    least: float,
    most: float,
    *,
    inside: bool = False,
    below: bool = False,
    none: bool = False,
    **options: float | None,
) -> None:
    """Raise `ConfigurationError` unless every option is a number from `least` to `most`, or `inside` of these.

    With `below` it may be `least`, and not `most`.
    """
    for name, value in options.items():
        if value is None and none:
            continue
        excluded = (least, most) if inside else (most,) if below else ()
        if is_number(value) and least <= value <= most and value not in excluded:
            continue
        if math.isinf(least):
            allowed = "numbers"
        else:
            bounds = f"between {least:g} and" if inside else f"from {least:g} to{' below' if below else ''}"
            allowed = f"numbers {bounds} {most:g}"
        raise ConfigurationError(f"{name}={value!r}: allowed are {allowed}{', and None' if none else ''}")


def flag(**options: bool) -> None:
    """Raise `ConfigurationError` unless every option is `True` or `False`: `"false"` would count as true."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r}: allowed are True and False")


def label(**options: str) -> None:
    """Raise `ConfigurationError` unless every option is a string, and not an empty one."""
    for name, value in options.items():
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"{name}={value!r}: allowed are strings, not empty")


def instance_of(kind: type, *, none: bool = False, **options: object) -> None:
    """Raise `ConfigurationError` unless every option is an object of this kind, as which a class is none."""
    for name, value in options.items():
        if isinstance(value, kind) or (value is None and none):
            continue
        allowed = f"{kind.__name__} objects{', and None' if none else ''}"
        raise ConfigurationError(f"{name}={value!r}: allowed are {allowed}")


def one_of(allowed: Collection[str], **options: str) -> None:
    """Raise `ConfigurationError` unless every option is one of these words."""
    for name, value in options.items():
        if not isinstance(value, str) or value not in allowed:
            raise ConfigurationError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")


def names(**options: Collection[str]) -> None:
    """Raise `ConfigurationError` unless every option is a collection of strings, none of them empty."""
    for name, value in options.items():
        if (
            isinstance(value, str | bytes | Mapping)
            or not isinstance(value, Collection)
            or not all(isinstance(one, str) and one for one in value)
        ):
            raise ConfigurationError(f"{name}={value!r}: allowed are lists or sets of strings, not empty")


def function(
    *, none: bool = False, asynchronous: bool = False, arguments: int | None = 1, **options: object
) -> None:
    """Raise `ConfigurationError` unless every option is a function, or an object that can be called as one.

    A class is none: somebody has forgotten to make the object. Nor is an `async def` one, unless `asynchronous` ones
    are wanted, nor one that cannot be called with so many `arguments` (`None`: with names, which are not checked).
    """
    for name, value in options.items():
        if (callable(value) and not isinstance(value, type)) or (value is None and none):
            continue
        raise ConfigurationError(f"{name}={value!r}: allowed are functions{', and None' if none else ''}")
    synchronous(coroutines=asynchronous, **options)
    if arguments is not None:
        takes(arguments, **options)


def synchronous(*, coroutines: bool = False, **options: object) -> None:
    """Raise `ConfigurationError` for a generator or an `async def` function: called, it gives no answer.

    With `coroutines` an `async def` is one that somebody awaits.
    """
    for name, value in options.items():
        if _is_any(value, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            raise ConfigurationError(f"{name}={value!r}: allowed are functions that return, without `yield`")
        if not coroutines and _is_any(value, inspect.iscoroutinefunction):
            raise ConfigurationError(
                f"{name}={value!r}: allowed are functions that answer at once, and nobody would await an `async def`"
            )


def takes(arguments: int, **options: object) -> None:
    """Raise `ConfigurationError` for a function that cannot be called with so many arguments; `None` is none.

    One whose signature Python cannot tell, as of some that are written in C, is taken as it is.
    """
    for name, value in options.items():
        if not callable(value):
            continue
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):
            continue
        try:
            signature.bind(*[None] * arguments)
        except TypeError as error:
            given = {0: "no argument", 1: "one argument"}.get(arguments, f"{arguments} arguments")
            raise ConfigurationError(
                f"{name}={value!r}: allowed are functions that can be called with {given}: {error}"
            ) from None


def offers(methods: Collection[str], what: str, *, none: bool = False, **options: object) -> None:
    """Raise `ConfigurationError` unless every option is an object with these methods, as `what` says in words."""
    for name, value in options.items():
        if value is None and none:
            continue
        if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
            allowed = f"{what}, with {', '.join(methods)}{', and None' if none else ''}"
            raise ConfigurationError(f"{name}={value!r}: allowed are {allowed}")


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a number that clocks can count with: neither NaN nor an integer beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not math.isnan(value) if isinstance(value, float) else abs(value) < _TOO_LARGE


def store_of(part: str, what: str, store: object) -> None:
    """Raise `ConfigurationError` unless a store is `None` or one that offers this part, which keeps `what`."""
    if store is None:
        return
    # The class is asked first: to look at a store's part may already start something.
    offered = all(hasattr(type(store), name) or hasattr(store, name) for name in (part, "guard"))
    if isinstance(store, type) or not offered:
        raise ConfigurationError(
            f"store={store!r}: allowed are stores that keep {what}, such as MemoryStore() and RedisStore(...), and None"
        )


def _is_any(function: object, *kinds: Callable[[object], bool]) -> bool:
    """Tell whether a function, or what is called of an object that stands for one, is of one of these kinds."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, type):
        return False  # called, it gives an object
    called = getattr(function, "__call__", None)  # noqa: B004 - it is looked at, not asked for
    return any(kind(one) for one in (function, called) for kind in kinds)
