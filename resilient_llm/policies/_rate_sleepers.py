"""How those who wait for a rate limit sleep, and are woken.

One of them, the driver, sleeps until the next moment at which anything can be granted, the others until they are woken:
nobody polls, and no task runs in the background. Who is granted what must not enter here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial

import anyio

from resilient_llm._loop import EventLoop
from resilient_llm.core.ticket import Ticket, TicketState

__all__ = ["Sleepers"]


class _Sleeper:
    """One who waits: how to wake it, and how long it sleeps otherwise."""

    __slots__ = ("_loop", "deadline", "scope", "turn")

    def __init__(self, loop: EventLoop, deadline: float) -> None:
        self._loop = loop
        self.deadline = deadline
        self.turn = anyio.Event()
        self.scope: anyio.CancelScope | None = None

    def wake(self) -> None:
        self._loop.tell(self.turn.set)

    def sleep_until(self, when: float) -> None:
        """Let it sleep no longer than until then."""
        if self.scope is not None:
            self._loop.tell(partial(setattr, self.scope, "deadline", min(self.deadline, when)))


class Sleepers:
    """Let calls sleep until their tickets are granted; `next_at` says when somebody has to look at the latest."""

    __slots__ = ("_by_ticket", "_driver", "_next_at")

    def __init__(self, next_at: Callable[[], float]) -> None:
        # Ordered: in a plain dict the first of many is hard to find once those before it are gone.
        self._by_ticket: OrderedDict[Ticket[Hashable], _Sleeper] = OrderedDict()
        self._driver: _Sleeper | None = None
        self._next_at = next_at

    def __bool__(self) -> bool:
        return bool(self._by_ticket)

    async def sleep(self, ticket: Ticket[Hashable], loop: EventLoop, look: Callable[[float], None]) -> None:
        """Sleep until a ticket waits no longer, or its deadline has come; calls `look` with the time when it is due.

        Cancelled, or too late, it sleeps no longer all the same.
        """
        sleeper = self._by_ticket[ticket] = _Sleeper(loop, ticket.deadline)
        try:
            while ticket.state is TicketState.WAITING:
                with anyio.CancelScope(deadline=sleeper.deadline) as sleeper.scope:
                    self.appoint()
                    await sleeper.turn.wait()
                now = loop.time()
                if ticket.state is TicketState.WAITING:
                    look(now)
                    if now >= sleeper.deadline:
                        return
        finally:
            self._by_ticket.pop(ticket, None)
            if self._driver is sleeper:
                self._driver = None

    def wake(self, tickets: Iterable[Ticket[Hashable]]) -> None:
        """Wake whoever has one of these tickets."""
        for ticket in tickets:
            sleeper = self._by_ticket.pop(ticket, None)
            if sleeper is not None:
                sleeper.wake()
                if sleeper is self._driver:
                    self._driver = None
        self.appoint()

    def appoint(self) -> None:
        """See to it that one of them sleeps no longer than until something can be granted."""
        driver = self._driver
        if driver is None:
            driver = self._driver = next(iter(self._by_ticket.values()), None)
        if driver is not None:
            driver.sleep_until(self._next_at())

    def forget(self) -> None:
        """Forget everybody: their event loop has ended."""
        self._by_ticket.clear()
        self._driver = None
