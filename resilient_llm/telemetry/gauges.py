"""Observable gauges over sources that come and go.

Pipelines share names (two clients each have a bulkhead), while OpenTelemetry keeps only the callback an
instrument was first made with, and a reader must not meet the same series twice. So there is one instrument
for each name, and what its sources report under the same labels is merged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from resilient_llm.telemetry.labels import Labels
from resilient_llm.telemetry.safety import report

__all__ = ["Gauges", "Merge", "Observe"]

Observe: TypeAlias = Callable[[], Iterable[tuple[float, Mapping[str, str]]]]
"""Gives the values there are now, each with its labels. Called from a reader's thread."""

Merge: TypeAlias = Callable[[Iterable[float]], float]


class Gauges:
    """Keep one instrument for each name, and weakly the bound methods it asks for values."""

    def __init__(self, meter: Meter, labels: Labels) -> None:
        self._meter = meter
        self._labels = labels
        self._sources: dict[str, list[weakref.WeakMethod[Observe]]] = {}

    def add(self, name: str, observe: Observe, *, unit: str, description: str, merge: Merge) -> None:
        """Report what `observe`, a bound method, gives while its owner lives; once, however often it is added."""
        sources = self._sources.get(name)
        if sources is None:
            sources = self._sources[name] = []

            def collect(_options: CallbackOptions) -> Iterator[Observation]:
                return self._collect(name, merge)

            self._meter.create_observable_gauge(name, [collect], unit, description)
        sources[:] = [source for source in sources if source() is not None]
        added = weakref.WeakMethod(observe)
        if added not in sources:  # a policy may stand in several pipelines
            sources.append(added)

    def _collect(self, name: str, merge: Merge) -> Iterator[Observation]:
        series: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for source in list(self._sources[name]):
            observe = source()
            if observe is None:
                continue
            try:
                for value, labels in observe():
                    key = tuple((label, self._labels.bound(label, text)) for label, text in labels.items())
                    series.setdefault(key, []).append(value)
            except Exception as error:  # noqa: BLE001 - one broken source must not take the others with it
                report(f"gauge {name}", error)
        for key, values in series.items():
            yield Observation(merge(values), dict(key))
