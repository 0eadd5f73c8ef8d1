"""How a wait in a room has ended, in the words of telemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_llm.core.ticket import TicketState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient_llm.telemetry import WaitOutcome

__all__ = ["wait_outcome"]

_OUTCOMES: Mapping[TicketState, WaitOutcome] = {
    TicketState.GRANTED: "acquired",
    TicketState.DISPLACED: "rejected",
}


def wait_outcome(state: TicketState) -> WaitOutcome:
    """Say how the wait of a ticket ended that nobody has cancelled."""
    return _OUTCOMES.get(state, "timeout")
