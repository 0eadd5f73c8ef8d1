"""Who a call is for and when it must be done, carried by a context variable.

The ASGI door sets it for everything an app does; `ambient` sets it by hand. The client door reads it. What code
runs inside of, and what is held meanwhile, is carried along.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from resilient_llm.errors import ConfigurationError

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["Ambient", "ambient", "current", "enclosing", "is_held_above"]

_MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """What calls made in this context inherit."""

    tenant: str | None = None
    priority: int = 0
    purpose: str | None = None
    deadline: float = math.inf
    """On `anyio.current_time()`'s clock."""
    owner: Call | None = None
    """The call this was inherited from: its deadline counts for nothing once it has finished."""

    def effective_deadline(self) -> float:
        """Give the deadline, or infinity when the call it came from has finished."""
        if self.owner is not None and self.owner.finished:
            return math.inf
        return self.deadline


current: ContextVar[Ambient] = ContextVar("resilient_llm.ambient", default=Ambient())  # noqa: B039 - frozen

enclosing: ContextVar[Call | None] = ContextVar("resilient_llm.enclosing", default=None)
"""The request or attempt that runs the code of this context, set where a door hands over to the application."""


def is_held_above(held: object) -> bool:
    """Tell whether a call that waits for this code holds something, such as a pool one of whose slots it has."""
    call = enclosing.get()
    while call is not None and not call.finished:  # whoever has finished waits for nothing and holds nothing
        if held in call.taken or (call.parent is not None and held in call.parent.taken):
            return True
        call = call.enclosing
    return False


@contextmanager
def ambient(
    *,
    tenant: str | None = None,
    timeout: float | None = None,
    priority: int | None = None,
    purpose: str | None = None,
) -> Generator[Ambient]:
    """Set tenant, deadline, priority or purpose for the calls made inside.

    What is not given is inherited; a `timeout` (seconds from now) can only shorten an inherited
    deadline. The `purpose` (batch, say) is what credentials may be kept for. Use it inside one task; tasks started
    inside inherit it. Raises `ConfigurationError` for a tenant or a purpose that is no string, a timeout that is no
    number of seconds, and a priority that is no whole number.
    """
    for name, value in (("tenant", tenant), ("purpose", purpose)):
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"{name}={value!r}: allowed are strings, and None for the inherited one")
    if timeout is not None and not (_is_real(timeout) and 0 <= timeout <= math.inf):
        raise ConfigurationError(f"timeout={timeout!r}: allowed are seconds from 0, and None")
    if priority is not None and not (
        _is_real(priority) and isinstance(priority, int) and abs(priority) <= _MAX_PRIORITY
    ):
        raise ConfigurationError(
            f"priority={priority!r}: allowed are whole numbers from {-_MAX_PRIORITY} to {_MAX_PRIORITY}, and None"
        )
    inherited = current.get()
    owner, deadline = inherited.owner, inherited.effective_deadline()
    if timeout is not None:
        own = anyio.current_time() + timeout
        if own < deadline:
            owner, deadline = None, own
    here = replace(
        inherited,
        tenant=inherited.tenant if tenant is None else tenant,
        priority=inherited.priority if priority is None else priority,
        purpose=inherited.purpose if purpose is None else purpose,
        deadline=deadline,
        owner=owner,
    )
    token = current.set(here)
    try:
        yield here
    finally:
        current.reset(token)


def _is_real(value: object) -> bool:
    """Tell whether a value is a number that fits a float; `True` and `False` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value < sys.float_info.max
