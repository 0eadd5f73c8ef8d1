"""Who a call is for and when it must be done, carried by a context variable.

The ASGI door sets it for everything an app does; `ambient` sets it by hand. The client door reads it.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["Ambient", "ambient", "current"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """What calls made in this context inherit."""

    tenant: str | None = None
    priority: int = 0
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


@contextmanager
def ambient(
    *, tenant: str | None = None, timeout: float | None = None, priority: int | None = None
) -> Generator[Ambient]:
    """Set tenant, deadline or priority for the calls made inside.

    What is not given is inherited; a `timeout` (seconds from now) can only shorten an inherited
    deadline. Use it inside one task; tasks started inside inherit it.
    """
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
        deadline=deadline,
        owner=owner,
    )
    token = current.set(here)
    try:
        yield here
    finally:
        current.reset(token)
