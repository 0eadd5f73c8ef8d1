"""Circuits that the breakers of one process share: agreed on at once, and told to all others at once.

What a record means must not enter here.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakSet

from resilient_llm._loop import EventLoop, LoopBound
from resilient_llm.core.circuit_state import CircuitSnapshot
from resilient_llm.stores.protocol_circuits import Agreed, HearAgreed, HearChange

__all__ = ["MemoryCircuits"]


class _Group:
    """The circuits of one group, with the times when they were agreed on, and who takes part."""

    def __init__(self) -> None:
        self.version = 0
        self.agreed: dict[str, tuple[Agreed, float]] = {}
        self.members: WeakSet[_Member] = WeakSet()


class MemoryCircuits:
    """Keep circuits in memory; see `stores.protocol_circuits.Circuits`."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._made = 1
        self._loop = LoopBound("circuits", self._reset)

    def join(self, group: str, hear: HearChange) -> _Member:
        """Take part in a group."""
        self._loop.bind()
        shared = self._groups.setdefault(group, _Group())
        member = _Member(shared, hear, self._made)
        shared.members.add(member)
        return member

    def _reset(self) -> None:
        self._groups.clear()
        self._made += 1


class _Member:
    """Take part in a group; see `stores.protocol_circuits.CircuitGroup`."""

    def __init__(self, group: _Group, hear: HearChange, made: int) -> None:
        self._group = group
        self._hear = hear
        self.made = made
        self._behind = True

    def fresh(self, now: float) -> bool:  # noqa: ARG002 - it always is, but for what there was before it came
        """Tell whether all was heard."""
        return not self._behind

    async def refresh(self) -> None:
        """Hear what there is."""
        self._behind = False
        for key, (agreed, at) in list(self._group.agreed.items()):
            self._hear(key, _aged(agreed, _now() - at))
        self._hear(None, None)

    async def swap(self, key: str, expected: int, snapshot: CircuitSnapshot, late: HearAgreed) -> Agreed:  # noqa: ARG002 - never late
        """Compare and set, without ever yielding to another task."""
        return self._swap(key, expected, snapshot)

    def swap_soon(self, key: str, expected: int, snapshot: CircuitSnapshot, heard: HearAgreed) -> None:
        """Compare and set, at once; circuits are forgotten with their event loop, and so is what is said after it."""
        try:
            EventLoop.current()
        except RuntimeError:
            return
        heard(self._swap(key, expected, snapshot))

    def _swap(self, key: str, expected: int, snapshot: CircuitSnapshot) -> Agreed:
        group, now = self._group, _now()
        if key in group.agreed:
            agreed, at = group.agreed[key]
            if agreed.version != expected:
                return _aged(agreed, now - at)
        group.version += 1
        agreed = Agreed(self.made, group.version, snapshot)
        group.agreed[key] = agreed, now
        for member in list(group.members):
            if member is not self:
                member._hear(key, agreed)
                member._hear(None, None)
        return agreed._replace(accepted=True)


def _aged(agreed: Agreed, seconds: float) -> Agreed:
    """Give what is agreed on with the seconds that are left of its times now."""
    snapshot = agreed.snapshot
    return agreed._replace(
        snapshot=replace(
            snapshot,
            wait=max(0.0, snapshot.wait - seconds),
            probes={generation: left - seconds for generation, left in snapshot.probes.items()},
        )
    )


def _now() -> float:
    return EventLoop.current().time()
