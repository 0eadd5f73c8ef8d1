"""Circuits that processes share through a store: each decides by its own copy, and a change counts once all agree.

The windows stay local. Who opens a circuit, lets a probe through, or hears how one ended, changes the copy and offers
it to the store in place of the one that it was made from; if another process was quicker, the copy becomes what that
one made of it, and the change is made to this. Copies are kept fresh, so that nothing is asked while a circuit is
closed. Without the store circuits are local. How a circuit decides must not enter here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import anyio

from resilient_llm._loop import LoopBound
from resilient_llm.core.circuit import Admission, Circuit, CircuitOptions, CircuitState, Refusal, Result
from resilient_llm.errors import ConfigurationError, StoreUnavailableError
from resilient_llm.policies._store_events import tell_store
from resilient_llm.policies._store_names import claim
from resilient_llm.shared_keys import shared_key

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.stores.protocol_circuits import Agreed, CircuitGroup, CircuitStore

__all__ = ["SharedCircuit", "SharedCircuits"]

_TRIES: Final = 8
"""Each time that another process was quicker it has taken a probe, or ended one."""
_AGAIN_IN: Final = 0.1
_MISSING: Final = 1.0
"""Seconds after which the reply to an offer is not waited for any longer."""
_MOST_PENDING: Final = 32


class SharedCircuit:
    """The copy of one circuit, what of it is agreed on, and what was done to it that is not yet."""

    __slots__ = (
        "__weakref__",
        "again",
        "alone",
        "circuit",
        "generation",
        "key",
        "made",
        "offered_at",
        "pending",
        "version",
    )

    def __init__(self, key: str, circuit: Circuit) -> None:
        self.key = key
        self.circuit = circuit
        self.made = 0
        self.version = 0
        self.generation = circuit.generation
        """That of the copy when it was agreed on: since then it has changed if it has another."""
        self.pending: list[Callable[[float], None]] = []
        self.alone: list[Admission] = []
        """Probes that were let through without the store."""
        self.offered_at: float | None = None
        self.again = False
        """Whether the store has forgotten it, and is to be told although nothing has changed."""

    @property
    def changed(self) -> bool:
        """Tell whether the copy is another than what is agreed on."""
        return self.circuit.generation != self.generation


class SharedCircuits:
    """Keep the circuits of one breaker in agreement with those of the same name in other processes."""

    def __init__(self, store: CircuitStore, name: str, options: CircuitOptions, *, max_keys: int) -> None:
        if not claim(store, "circuits", name, options):
            raise ConfigurationError(
                f"name={name!r}: another CircuitBreaker with other options keeps its circuits in the same store by "
                "this name; give each a name= of its own"
            )
        self.guard = store.guard
        self._store = store
        self._name = shared_key(name)
        self._max_keys = max_keys
        self._copies: WeakValueDictionary[str, SharedCircuit] = WeakValueDictionary()
        self._known: dict[str, tuple[Agreed, float]] = {}
        """What was heard of each circuit last, and when: also of those that nobody has asked for here."""
        self._behind: set[SharedCircuit] = set()  # changed, and not agreed on
        self._made = 0
        self._group: CircuitGroup | None = None
        self._refreshing: anyio.Event | None = None
        self._loop = LoopBound(name, self._forget)

    def _forget(self) -> None:
        """Start afresh in another event loop."""
        self._copies.clear()
        self._known.clear()
        self._behind.clear()
        self._made = 0
        self._group = self._refreshing = None

    def share(self, key: Hashable, circuit: Circuit) -> SharedCircuit:
        """Make a new circuit the copy of the one that is agreed on.

        Raises `ConfigurationError` for a key that other processes may not write the same way.
        """
        copy = SharedCircuit(shared_key(key), circuit)
        self._copies[copy.key] = copy
        if copy.key in self._known:
            self._adopt(copy, *self._known[copy.key])
        return copy

    def state(self, key: Hashable) -> CircuitState:
        """Give the state of a circuit that nobody has asked for in this process."""
        known = self._known.get(shared_key(key))
        return CircuitState.CLOSED if known is None else known[0].snapshot.state

    async def admit(self, call: Call, copy: SharedCircuit) -> Admission | Refusal:
        """Let a call through, or refuse it; a probe once all agree on it."""
        loop = call.loop
        group = self._join()
        now = loop.time()
        if not group.fresh(now) and self.guard.closed:
            await self._refresh(group)
            now = loop.time()
        if self.guard.changes:
            tell_store(call, self.guard)
        for _ in range(_TRIES):
            admission = copy.circuit.admit(now)
            if isinstance(admission, Refusal) or not admission.is_probe:
                if copy.changed:
                    self._offer(copy, now)
                return admission
            if await self._agree(call, group, copy, admission, now):
                return admission
            now = loop.time()
        return Refusal(copy.circuit.retry_after(now) or _AGAIN_IN, copy.circuit.state, copy.circuit.reason)

    def look(self, call: Call, copy: SharedCircuit) -> float:
        """Give the seconds until the circuit would let a call through, by the copy, which is kept fresh by asking."""
        now = call.loop.time()
        self._join().fresh(now)
        wait = copy.circuit.retry_after(now)
        if copy.changed:
            self._offer(copy, now)
        return wait

    def record(
        self,
        copy: SharedCircuit,
        admission: Admission,
        now: float,
        result: Result,
        *,
        time_to_first_token: float | None,
        retry_after: float | None,
    ) -> None:
        """Take note of how an admitted call ended, and offer what becomes of the circuit."""

        def record(admission: Admission, now: float) -> None:
            copy.circuit.record(
                admission, now, result, time_to_first_token=time_to_first_token, retry_after=retry_after
            )

        before = copy.circuit.generation
        record(admission, now)
        if copy.circuit.generation != before:
            # What opened it belongs to a window that is no more once others have changed the circuit.
            if admission.is_probe and admission not in copy.alone:
                self._repeat(copy, lambda now: record(Admission(admission.generation, is_probe=True), now))
            self._offer(copy, now)

    def change(self, copy: SharedCircuit, change: Callable[[float], None], now: float) -> None:
        """Change a circuit by hand, here and in all processes."""
        change(now)
        self._repeat(copy, change)
        self._offer(copy, now)

    def _join(self) -> CircuitGroup:
        self._loop.bind()
        if self._group is None:
            self._group = self._store.circuits.join(self._name, self._hear)
        return self._group

    async def _refresh(self, group: CircuitGroup) -> None:
        """Hear what has changed while nobody asked; those who come meanwhile wait for the first to have heard."""
        if self._refreshing is not None:
            await self._refreshing.wait()
            return
        self._refreshing = heard = anyio.Event()
        try:
            await group.refresh()
        except StoreUnavailableError:
            self.guard.unguarded += 1
        finally:
            if self._refreshing is heard:
                self._refreshing = None
            heard.set()

    async def _agree(
        self, call: Call, group: CircuitGroup, copy: SharedCircuit, probe: Admission, now: float
    ) -> bool:
        """Have all agree on a probe; `False` when another process was quicker, and the copy is as that one made it."""
        generation, pending = copy.circuit.generation, len(copy.pending)
        heard = partial(self._hear_offer, copy, generation, pending)

        def hear_late(agreed: Agreed) -> None:
            if agreed.accepted and probe in copy.alone:
                copy.alone.remove(probe)
            heard(agreed)

        try:
            agreed = await group.swap(copy.key, copy.version, copy.circuit.snapshot(now), hear_late)
        except StoreUnavailableError:
            self.guard.unguarded += 1
            copy.alone.append(probe)
            self._behind.add(copy)
            return True
        except BaseException:
            copy.circuit.record(probe, call.loop.time(), Result.NEUTRAL)
            self._offer(copy, call.loop.time())
            raise
        finally:
            tell_store(call, self.guard)
        heard(agreed)
        return agreed.accepted

    def _repeat(self, copy: SharedCircuit, change: Callable[[float], None]) -> None:
        """Make a change again to whatever others have made of the circuit, until it is agreed on."""
        copy.pending.append(change)
        del copy.pending[:-_MOST_PENDING]

    def _offer(self, copy: SharedCircuit, now: float) -> None:
        """Offer the copy to all, soon."""
        if not copy.changed and not copy.again:
            self._behind.discard(copy)
            return
        self._behind.add(copy)
        on_its_way = copy.offered_at is not None and now - copy.offered_at < _MISSING
        if on_its_way or not self.guard.closed:
            return  # it is when the reply comes, or the store is heard of again
        copy.offered_at = now
        self._join().swap_soon(
            copy.key,
            copy.version,
            copy.circuit.snapshot(now),
            partial(self._hear_offer, copy, copy.circuit.generation, len(copy.pending)),
        )

    def _hear_offer(self, copy: SharedCircuit, generation: int, pending: int, agreed: Agreed) -> None:
        """Hear what came of an offer, which had this generation and so many changes in it."""
        now = self._loop.time()
        copy.offered_at = None
        copy.again = False
        if not agreed.accepted:
            self._adopt(copy, agreed, now)
        elif self._newer(copy, agreed):
            copy.made, copy.version, copy.generation = agreed.made, agreed.version, generation
            self._know(copy.key, agreed, now)
            del copy.pending[:pending]
        self._offer(copy, now)

    def _hear(self, key: str | None, agreed: Agreed | None) -> None:
        """Hear that a circuit was changed elsewhere, and at last that this was all."""
        now = self._loop.time()
        if key is None or agreed is None:
            self._heard_all(now)
            return
        copy = self._copies.get(key)
        if copy is None:
            self._know(key, agreed, now)
        else:
            self._adopt(copy, agreed, now)

    def _heard_all(self, now: float) -> None:
        for copy in list(self._behind):
            self._offer(copy, now)
        group = self._group
        if group is not None and group.made != self._made:
            self._made = group.made
            # The store has lost its memory: it is told again what those who come may not know.
            for copy in list(self._copies.values()):
                if copy.circuit.state is not CircuitState.CLOSED and copy.made != self._made:
                    copy.again = True
                    self._offer(copy, now)

    def _newer(self, copy: SharedCircuit, agreed: Agreed) -> bool:
        if agreed.made != copy.made and self._group is not None and agreed.made == self._group.made:
            return True
        return (agreed.made, agreed.version) > (copy.made, copy.version)

    def _adopt(self, copy: SharedCircuit, agreed: Agreed, now: float) -> None:
        """Make the copy what others have agreed on, unless that is old news, and repeat what was done here."""
        if not self._newer(copy, agreed):
            return
        copy.again = False
        circuit = copy.circuit
        for probe in copy.alone:
            probe.settled = True  # its generation may be the name of another's
        copy.alone.clear()
        # Whoever made a change tells of it; nobody does of a probe that came too late.
        own = [change for change in circuit.transitions if change.reason != "break_elapsed"]
        circuit.restore(agreed.snapshot, now)
        circuit.transitions[:] = own
        copy.made, copy.version, copy.generation = agreed.made, agreed.version, agreed.snapshot.generation
        self._know(copy.key, agreed, now)
        for change in copy.pending:
            change(now)
        if copy.changed:
            self._behind.add(copy)
        else:
            copy.pending.clear()

    def _know(self, key: str, agreed: Agreed, now: float) -> None:
        self._known[key] = agreed, now
        if len(self._known) > self._max_keys:
            oldest = [each for each, _ in zip(self._known, range(_MOST_PENDING), strict=False)]
            closed = (each for each in oldest if self._known[each][0].snapshot.state is CircuitState.CLOSED)
            del self._known[next(closed, oldest[0])]
