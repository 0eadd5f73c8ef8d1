"""What is told of a target that somebody has changed by hand: in a log and on a span.

What the change does is the router's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from resilient_llm.telemetry.names import TARGET_CHANGED, TARGET_NAME, TARGET_WEIGHT

__all__ = ["ByHand", "TargetChange"]

ByHand: TypeAlias = Literal["isolated", "restored", "weighted"]


class TargetChange(NamedTuple):
    """Say what was done with a target by hand; `weight` is the one it has from now on."""

    router: str
    target: str
    changed: ByHand
    weight: float

    def __str__(self) -> str:
        return (
            f"router={self.router!r} target={self.target!r} changed={self.changed!r} weight={self.weight:g}"
        )

    def attributes(self) -> Mapping[str, str | float]:
        """Say it in the words of an event on a span."""
        return {TARGET_NAME: self.target, TARGET_CHANGED: self.changed, TARGET_WEIGHT: self.weight}
