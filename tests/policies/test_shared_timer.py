"""One timer for many deadlines, by itself: when it rings, and for whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import anyio
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm._loop import EventLoop
from resilient_llm.policies._shared_timer import SharedTimer


class Loop:
    """An event loop that is nothing but a clock and timers."""

    def __init__(self, *, timers: bool = True) -> None:
        self.now = 0.0
        self.set: list[tuple[float, Callable[[], None]]] = []
        self._timers = timers

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> bool:
        if self._timers:
            self.set.append((when, callback))
        return self._timers

    def go_on(self, until: float) -> int:
        """Let that time come; gives how many timers have rung."""
        rung = 0
        while due := [timer for timer in self.set if timer[0] <= until]:
            timer = min(due, key=lambda timer: timer[0])
            self.set.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()
            rung += 1
        self.now = until
        return rung


class Scope:
    """A cancel scope that notes when it was cancelled."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.deadline = math.inf
        self.cancelled_at: float | None = None

    def cancel(self) -> None:
        assert self.cancelled_at is None
        self.cancelled_at = self._loop.now


def begun(loop: Loop) -> tuple[SharedTimer, Callable[[float], Scope]]:
    """Make a timer, and what gives it one more scope to watch."""
    timer = SharedTimer(cast("EventLoop", loop))

    def watched(deadline: float) -> Scope:
        scope = Scope(loop)
        timer.watch(cast("anyio.CancelScope", scope), deadline)
        return scope

    return timer, watched


def test_each_is_cancelled_at_its_own_deadline_by_one_timer() -> None:
    loop = Loop()
    _, watched = begun(loop)
    scopes = [watched(5), watched(5), watched(7)]
    assert len(loop.set) == 1
    assert loop.go_on(4.9) == 0
    assert loop.go_on(60) == 2
    assert [scope.cancelled_at for scope in scopes] == [5, 5, 7]


def test_however_many_are_done_in_time_the_timer_rings_once_a_deadline() -> None:
    loop = Loop()
    timer, watched = begun(loop)
    rung = 0
    for second in range(1_000):
        rung += loop.go_on(second)
        timer.leave(cast("anyio.CancelScope", watched(second + 100)))
    assert rung <= 10
    assert len(loop.set) == 1
    assert loop.go_on(5_000) == 1
    assert not loop.set  # nobody is left to wait for


def test_one_that_rings_too_early_is_set_again() -> None:
    loop = Loop()
    _, watched = begun(loop)
    scope = watched(5)
    ((_, ring),) = loop.set
    loop.set.clear()
    loop.now = 4.999
    ring()
    assert scope.cancelled_at is None
    assert loop.go_on(5) == 1
    assert scope.cancelled_at == 5


def test_a_deadline_out_of_turn_is_the_scopes_own() -> None:
    loop = Loop()
    _, watched = begun(loop)
    later, sooner = watched(5), watched(2)
    assert (later.deadline, sooner.deadline) == (math.inf, 2)
    loop.go_on(60)
    assert (later.cancelled_at, sooner.cancelled_at) == (5, None)


def test_without_timers_every_scope_has_its_own_deadline() -> None:
    loop = Loop(timers=False)
    timer, watched = begun(loop)
    scopes = [watched(5), watched(6)]
    assert [scope.deadline for scope in scopes] == [5, 6]
    timer.leave(cast("anyio.CancelScope", scopes[0]))  # never watched, so there is nothing to leave


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 20), st.floats(0.1, 8)), max_size=30))
def test_every_scope_ends_exactly_once_at_its_deadline_or_when_it_is_left(
    calls: list[tuple[float, float, float]],
) -> None:
    loop = Loop()
    timer, watched = begun(loop)
    clock = 0.0
    open_: list[tuple[float, float, Scope]] = []
    for pause, lasts, total in calls:
        clock += pause
        for leaves, _, scope in sorted(open_, key=lambda each: each[0]):
            if leaves <= clock:
                loop.go_on(max(loop.now, leaves))
                timer.leave(cast("anyio.CancelScope", scope))
        loop.go_on(max(loop.now, clock))
        deadline = clock + total
        open_.append((clock + lasts, deadline, watched(deadline)))
    loop.go_on(1e6)
    for leaves, deadline, scope in open_:
        own = scope.deadline == deadline
        assert own or scope.cancelled_at == deadline or (scope.cancelled_at is None and leaves <= deadline)
