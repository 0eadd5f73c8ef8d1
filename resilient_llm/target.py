"""One deployment that can answer: where it is, what it is called there, and what it can do.

Values only. Which target an attempt goes to is `routing`'s to decide, and what becomes of a request on its way
there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient_llm.call import Policy

__all__ = ["Target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One deployment that can answer.

    `url` is where requests go instead of where the caller sends them, and `model` what its provider calls the model;
    `None` leaves either as the caller has it. `policies` are its own limits and circuit, outermost first.
    """

    name: str
    address: str = ""
    port: int | None = None
    url: str | None = None
    provider: str | None = None
    model: str | None = None
    weight: float = 1.0
    context_window: int | None = None
    policies: Sequence[Policy] = ()
