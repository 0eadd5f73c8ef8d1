"""Observable gauges over sources that come and go.

Pipelines share names (two clients each have a bulkhead), while OpenTelemetry keeps only the callback an
instrument was first made with, and a reader must not meet the same series twice. So there is one instrument
for each name, and what its sources report under the same labels is merged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from resilient_llm.telemetry.labels import OTHER, Labels
from resilient_llm.telemetry.names import TENANT
from resilient_llm.telemetry.safety import report

__all__ = ["Gauges", "Merge", "Observe", "Tenants"]

Observe: TypeAlias = Callable[[], Iterable[tuple[float, Mapping[str, str]]]]
"""Gives the values there are now, each with its labels. Called from a reader's thread."""

Merge: TypeAlias = Callable[[Iterable[float]], float]

Tenants: TypeAlias = Callable[[], Collection[str] | None]
"""Gives the tenants that are labels now, the rest being `other`; `None` where none is."""

_Source: TypeAlias = tuple["weakref.WeakMethod[Observe]", Tenants]


def _no_tenants() -> None:
    return None


class Gauges:
    """Keep one instrument for each name, and weakly the bound methods it asks for values."""

    def __init__(self, meter: Meter, labels: Labels) -> None:
        self._meter = meter
        self._labels = labels
        self._sources: dict[str, list[_Source]] = {}

    def add(
        self,
        name: str,
        observe: Observe,
        *,
        unit: str,
        description: str,
        merge: Merge,
        tenants: Tenants = _no_tenants,
    ) -> None:
        """Report what `observe`, a bound method, gives while its owner lives; once, however often it is added."""
        sources = self._sources.get(name)
        if sources is None:
            sources = self._sources[name] = []

            def collect(_options: CallbackOptions) -> Iterator[Observation]:
                return self._collect(name, merge)

            self._meter.create_observable_gauge(name, [collect], unit, description)
        added = weakref.WeakMethod(observe)
        # A policy may stand in several pipelines.
        sources[:] = [source for source in sources if source[0]() is not None and source[0] != added]
        sources.append((added, tenants))

    def _collect(self, name: str, merge: Merge) -> Iterator[Observation]:
        series: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for source, tenants in list(self._sources[name]):
            observe = source()
            if observe is None:
                continue
            known = tenants()
            try:
                for value, labels in observe():
                    key = tuple(self._bound(labels, known))
                    series.setdefault(key, []).append(value)
            except Exception as error:  # noqa: BLE001 - one broken source must not take the others with it
                report(f"gauge {name}", error)
        for key, values in series.items():
            yield Observation(merge(values), dict(key))

    def _bound(self, labels: Mapping[str, str], tenants: Collection[str] | None) -> Iterator[tuple[str, str]]:
        for label, text in labels.items():
            if label != TENANT:
                yield label, self._labels.bound(label, text)
            elif tenants is not None:
                yield label, text if text in tenants else OTHER
