"""Calls that wait for a credential which others are using, in the order in which they came.

Whoever gives a credential back wakes one that can use it. What a call may wait for, and how long, the router says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.core.credential_pool import CredentialPool

__all__ = ["Waiting"]


class _Waiter:
    """One call, and where it could get what it waits for."""

    __slots__ = ("call", "pools", "turn")

    def __init__(self, call: Call, pools: Sequence[CredentialPool]) -> None:
        self.call = call
        self.pools = pools
        self.turn = anyio.Event()

    def is_served(self, now: float) -> bool:
        return any(pool.is_ready(now, self.call.purpose) for pool in self.pools)


class Waiting:
    """Let calls wait until it is their turn to use a credential of one of several pools."""

    __slots__ = ("_waiters", "deciding")

    def __init__(self) -> None:
        self._waiters: dict[_Waiter, None] = {}  # a set that keeps its order
        self.deciding: list[_Waiter] = []
        """Those whose turn it is, and who have not run since."""

    async def wait(
        self, call: Call, pools: Sequence[CredentialPool], seconds: float, *, again: bool = False
    ) -> None:
        """Wait for so many seconds, or until it is the call's turn; it must decide then before it awaits anything.

        One that waits `again` is the first in the row.
        """
        if not pools:
            await anyio.sleep(seconds)
            return
        waiter = _Waiter(call, pools)
        if again:
            self._waiters = {waiter: None, **self._waiters}
        else:
            self._waiters[waiter] = None
        try:
            with anyio.move_on_after(seconds):
                await waiter.turn.wait()
        finally:
            if waiter.turn.is_set():
                call.loop.post(lambda: self._decided(waiter))
            else:
                del self._waiters[waiter]

    def _decided(self, waiter: _Waiter) -> None:
        """Let the next one have what the call did not take."""
        self.deciding.remove(waiter)
        self.wake(waiter.call.loop.time())

    def wake(self, now: float) -> None:
        """Give the first call a turn that could have a credential now."""
        for waiter in self._waiters:
            if waiter.is_served(now):
                del self._waiters[waiter]
                self.deciding.append(waiter)
                waiter.turn.set()
                return

    def is_others_turn(self, call: Call, pool: CredentialPool) -> bool:
        """Tell whether a call whose turn it is not would take what another has waited for."""
        deciding = self.deciding
        if any(waiter.call is call for waiter in deciding):
            return False
        return any(pool in waiter.pools for waiter in deciding)
