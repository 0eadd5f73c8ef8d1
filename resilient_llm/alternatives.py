"""What may still become of a failed call: protocols between who owns its attempts and who knows where they go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["Again", "EarlyChecked", "Route"]


class Again(NamedTuple):
    """Say in how many seconds something may be tried again, and over how many more those who wait should spread."""

    wait: float
    spread: float = 0.0


class Route(Protocol):
    """Say where else a call may go after an attempt of it has failed; a `Router` makes it."""

    @property
    def tries(self) -> int:
        """Give the number of attempts made of the model it is at."""
        ...

    def elsewhere(self, call: Call) -> bool:
        """Tell whether a target that answers for the same model is untried in this round, and usable now."""
        ...

    def again_in(self, call: Call, delay: float) -> Again:
        """Give the seconds, at least `delay`, until a target of the same model may be tried again.

        Infinity when none may: trying it again is useless, or its circuit will not be closed by then.
        """
        ...

    def begin_round(self) -> None:
        """Let every target have another turn: the call has waited."""
        ...

    def next_model(self, call: Call) -> bool:
        """Go on to the next model of the chain; `False`, and nothing, when there is none that may be tried."""
        ...


class EarlyChecked(Protocol):
    """Say beforehand whether an attempt would be let through."""

    def reopens_in(self, call: Call) -> float:
        """Give the seconds until the call would be let through, as things stand; 0 is now."""
        ...
