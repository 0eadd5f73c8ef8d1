"""The guard of a store on several servers: each has a circuit of its own, so that one that fails leaves others alone.

Which server keeps what must not enter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resilient_llm.stores.guard import OnStoreError, StoreGuard
from resilient_llm.telemetry.names import STORE_NAME

__all__ = ["ClusterGuard", "NodeGuard"]


class NodeGuard(StoreGuard):
    """Guard one server of a store; what there is to tell of it the store's guard tells."""

    def __init__(self, store: StoreGuard, node: str) -> None:
        super().__init__(f"{store.name} at {node}", store.on_error)
        self._store = store

    def lose(self) -> None:
        """Count something that was to be told to the store and never will be."""
        self._store.lose()

    def _note(self) -> None:
        before = self.transitions
        super()._note()
        self._store.transitions += self.transitions - before
        self._store.changes += self.drain()


class ClusterGuard(StoreGuard):
    """Guard a store by the guards of its servers: it is given up on when all of them are."""

    def __init__(self, name: str, on_error: OnStoreError = "local") -> None:
        super().__init__(name, on_error)
        self._nodes: dict[str, NodeGuard] = {}

    @property
    def well(self) -> bool:
        """Tell whether there is a server that is not given up on."""
        return not self._nodes or any(each.well for each in self._nodes.values())

    def node(self, name: str) -> NodeGuard:
        """Give the guard of one server."""
        guard = self._nodes.get(name)
        if guard is None:
            guard = self._nodes[name] = NodeGuard(self, name)
        return guard

    def retry_after(self) -> float:
        """Say how many seconds it takes until one of the servers is asked again; 0 when one is."""
        return min((each.retry_after() for each in self._nodes.values()), default=0.0)

    def _state(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        for each in self._nodes.values():
            yield (0.0 if each.well else 1.0), {STORE_NAME: each.name}
