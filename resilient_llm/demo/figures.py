"""What the demo measured: each tenant's figures, and whether they show what the demo is there to show.

Durations come from the tenants' own clocks, waits and retries from the spans that the library made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from resilient_llm.demo.load import Load, Tally
from resilient_llm.demo.scenario import FAILING_MODEL, NOISY, QUIET, Faults
from resilient_llm.telemetry import names

__all__ = ["Figures", "SpanFigures", "TenantFigures", "percentile", "seconds_of"]

Attributes: TypeAlias = Mapping[str, AttributeValue]


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Give the nearest-rank percentile; `None` of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def seconds_of(span: ReadableSpan) -> float:
    """Give the duration of a span that has ended."""
    return ((span.end_time or 0) - (span.start_time or 0)) / 1e9


class SpanFigures:
    """Read waits, retries and circuit changes from spans as they end."""

    def __init__(self) -> None:
        self.requests = 0
        """How many requests the app has done with."""
        self.retries: defaultdict[str, int] = defaultdict(int)
        """By tenant."""
        self.waits: defaultdict[str, list[float]] = defaultdict(list)
        """By tenant: for each call that was served the seconds it had waited for a slot."""
        self.hinted_retries = 0
        """How many retries the provider had told when to come."""
        self.early_retries = 0
        """How many of these came sooner all the same."""
        self._changes: list[tuple[int, str]] = []
        self._hints: dict[int, float] = {}  # by the call's span: what its last attempt was told
        self._waited: dict[int, float] = {}  # by the server span around it; a child ends before its parent

    def add(self, spans: Iterable[ReadableSpan]) -> None:
        """Read spans that have ended, in the order in which they did."""
        for span in spans:
            attributes = span.attributes or {}
            if span.kind is SpanKind.SERVER:
                self._add_request(span, attributes)
            elif names.RETRIES in attributes:
                self._add_call(span, attributes)
            elif span.parent is not None:
                self._add_part(span, attributes, of=span.parent.span_id)

    def _add_request(self, span: ReadableSpan, attributes: Attributes) -> None:
        self.requests += 1
        waited = self._waited.pop(span.context.span_id, 0.0)
        if attributes.get(names.STATUS_CODE) == 200:
            self.waits[str(attributes.get(names.TENANT))].append(waited)

    def _add_call(self, span: ReadableSpan, attributes: Attributes) -> None:
        self.retries[str(attributes.get(names.TENANT))] += int(str(attributes[names.RETRIES]))
        if attributes.get(names.REQUEST_MODEL) == FAILING_MODEL:
            for event in span.events:
                if (to := (event.attributes or {}).get(names.BREAKER_TO)) is not None:
                    self._changes.append((event.timestamp, str(to)))

    def _add_part(self, span: ReadableSpan, attributes: Attributes, *, of: int) -> None:
        if names.WAIT_OUTCOME in attributes:
            self._waited[of] = seconds_of(span)
        elif names.ATTEMPT_NUMBER in attributes:
            self._hints[of] = float(str(attributes.get(names.ATTEMPT_RETRY_AFTER, 0)))
        elif names.BACKOFF_SOURCE in attributes:
            hint = self._hints.pop(of, 0.0)
            self.hinted_retries += hint > 0
            self.early_retries += seconds_of(span) < hint

    @property
    def circuit(self) -> tuple[str, ...]:
        """The states that the failing model's circuit went to, in order."""
        return tuple(to for _, to in sorted(self._changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFigures:
    """One tenant's row. Times are in seconds, of the calls that were served; `None` when none was."""

    calls: int
    ok: int
    rejected: int
    failed: int
    retries: int
    wait_p50: float | None
    wait_p99: float | None
    total_p50: float | None
    total_p99: float | None

    @classmethod
    def of(cls, tally: Tally, waits: Sequence[float], retries: int) -> TenantFigures:
        """Sum up what a tenant got."""
        return cls(
            calls=tally.calls,
            ok=len(tally.ok),
            rejected=len(tally.rejected),
            failed=len(tally.failed),
            retries=retries,
            wait_p50=percentile(waits, 50),
            wait_p99=percentile(waits, 99),
            total_p50=percentile(tally.ok, 50),
            total_p99=percentile(tally.ok, 99),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All that was measured, until now or in all."""

    tenants: Mapping[str, TenantFigures]
    quiet: TenantFigures
    """The quiet tenants taken together."""
    refused_p50: float | None
    """How soon the noisy tenant was told of a refusal, in seconds."""
    provider_requests: int
    faults: Mapping[str, int]
    failures: int
    """Faults that were no reply; the others were late ones."""
    outage: float
    hinted_retries: int
    """Retries that a Retry-After had told when to come."""
    early_retries: int
    circuit: tuple[str, ...]
    """The states that the failing model's circuit went to, in order."""
    circuit_refusals: int

    @classmethod
    def of(cls, load: Load, spans: SpanFigures, faults: Faults, provider_requests: int) -> Figures:
        """Take stock."""
        together = Tally()
        for tenant in QUIET:
            together.add(load.tallies[tenant.name])
        return cls(
            tenants={
                name: TenantFigures.of(tally, spans.waits[name], spans.retries[name])
                for name, tally in load.tallies.items()
            },
            quiet=TenantFigures.of(
                together,
                [wait for tenant in QUIET for wait in spans.waits[tenant.name]],
                sum(spans.retries[tenant.name] for tenant in QUIET),
            ),
            refused_p50=percentile(load.tallies[NOISY.name].rejected, 50),
            provider_requests=provider_requests,
            faults=dict(faults.injected),
            failures=faults.failures,
            outage=faults.outage,
            hinted_retries=spans.hinted_retries,
            early_retries=spans.early_retries,
            circuit=spans.circuit,
            circuit_refusals=load.circuit_open,
        )

    @property
    def noisy(self) -> TenantFigures:
        """The noisy tenant's."""
        return self.tenants[NOISY.name]

    @property
    def retries(self) -> int:
        """Of all tenants."""
        return sum(tenant.retries for tenant in self.tenants.values())

    def shortfalls(self) -> list[str]:
        """Say what the run did not show, though it should have; empty when it showed everything."""
        quiet, noisy = self.quiet, self.noisy
        all_served = quiet.ok == quiet.calls
        partly_served = 0 < noisy.ok < noisy.calls and noisy.rejected > 0
        waits_apart = (quiet.wait_p99 or 0) < (noisy.wait_p99 or 0)
        spared = "open" in self.circuit and self.circuit_refusals > 0
        checks = {
            f"all calls of quiet tenants are served, but {quiet.ok} of {quiet.calls} were": all_served,
            f"the noisy tenant is served in part, but {noisy.ok} of {noisy.calls} calls were": partly_served,
            "the noisy tenant's queue is its own, but quiet tenants waited as long as it did": waits_apart,
            "failures of the provider are retried, but none was": self.failures > 0 and self.retries > 0,
            f"no retry comes sooner than told, but {self.early_retries} did": self.early_retries == 0,
            "the failing model's circuit opens and spares the provider calls, but it did not": spared,
            "the circuit closes again by itself, but it did not": self.circuit[-1:] == ("closed",),
        }
        return [claim for claim, holds in checks.items() if not holds]
