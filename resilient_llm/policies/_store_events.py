"""Tell what became of a store: once for each change, on whichever call comes first.

What is done without it, each policy says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_llm.telemetry.names import REASON, STORE_NAME, STORE_STATE, STORE_STATE_CHANGE

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.stores.guard import StoreGuard

__all__ = ["tell_store"]


def tell_store(call: Call, guard: StoreGuard) -> None:
    """Note on a call's span that its store was given up on, or is asked again, if nobody has yet."""
    if guard.changes:
        for change in guard.drain():
            call.telemetry.event(
                call,
                STORE_STATE_CHANGE,
                {STORE_NAME: change.store, STORE_STATE: change.to, REASON: change.error or change.reason},
            )
