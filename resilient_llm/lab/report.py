"""What a simulation showed: every call and every request, and the usual figures of any part of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

from resilient_llm.lab.exchange import Exchange
from resilient_llm.lab.record import CallRecord
from resilient_llm.lab.summary import Summary, finite, mean

__all__ = ["Bucket", "Report", "UpstreamReport", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamReport:
    """What one upstream saw, in order of arrival."""

    name: str
    exchanges: Sequence[Exchange] = field(repr=False)
    in_flight_max: int

    @property
    def requests(self) -> int:
        """Count the requests that came."""
        return len(self.exchanges)

    @property
    def times(self) -> list[float]:
        """Give when they came."""
        return [exchange.arrived for exchange in self.exchanges]

    def between(self, start: float, end: float) -> int:
        """Count the requests that came from `start` on and before `end`."""
        return sum(start <= exchange.arrived < end for exchange in self.exchanges)

    @property
    def longest_gap(self) -> float:
        """Give the longest time between two requests, in seconds; 0 for fewer than two."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)

    @property
    def statuses(self) -> Counter[int | None]:
        """Count the statuses of its responses; None is for connections that failed, and clients that left."""
        return Counter(exchange.status for exchange in self.exchanges)

    @property
    def failures(self) -> Counter[str]:
        """Count the ways in which requests failed."""
        return Counter(exchange.failure for exchange in self.exchanges if exchange.failure is not None)

    @property
    def tokens(self) -> int:
        """Count the tokens of prompts and replies, as far as they were made."""
        return sum(exchange.input_tokens + exchange.output_tokens for exchange in self.exchanges)

    @property
    def usd(self) -> float:
        """Give what it cost, in US dollars."""
        return math.fsum(exchange.usd for exchange in self.exchanges)

    @property
    def latency(self) -> Summary:
        """Sum up how long its answers took."""
        answers = (exchange for exchange in self.exchanges if exchange.answered)
        return Summary.of((exchange.ended or 0.0) - exchange.arrived for exchange in answers)

    def as_dict(self) -> dict[str, object]:
        """Give the figures."""
        return {
            "requests": self.requests,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items(), key=str)},
            "failures": dict(sorted(self.failures.items())),
            "in_flight_max": self.in_flight_max,
            "tokens": self.tokens,
            "usd": self.usd,
            "latency": self.latency.as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What happened in a stretch of time: the calls that began in it, and the requests that came to each upstream."""

    start: float
    calls: int
    success_ratio: float
    seconds: float
    """How long the calls took, on average."""
    requests: Mapping[str, int]
    gauges: Mapping[str, float]
    """The mean of what was sampled of each gauge."""

    def as_dict(self) -> dict[str, object]:
        """Give the figures."""
        return {
            "start": self.start,
            "calls": self.calls,
            "success_ratio": finite(self.success_ratio),
            "seconds": finite(self.seconds),
            "requests": dict(self.requests),
            "gauges": {name: finite(value) for name, value in self.gauges.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the calls of a simulation, in the order in which they came."""

    calls: Sequence[CallRecord] = field(repr=False)
    upstreams: Mapping[str, UpstreamReport]
    ended: float
    """When the last call had ended, in seconds since the simulation began."""
    gauges: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict, repr=False)
    """What each gauge showed, and when."""

    def where(
        self,
        *,
        tenant: str | None = None,
        model: str | None = None,
        since: float = 0.0,
        until: float = math.inf,
    ) -> Self:
        """Keep the calls of a tenant or a model, and those that began between two times; `upstreams` stays."""
        return self._of(
            call
            for call in self.calls
            if (tenant is None or call.tenant == tenant)
            and (model is None or call.model == model)
            and since <= call.started < until
        )

    @property
    def answered(self) -> Self:
        """Keep the calls that got a whole answer."""
        return self._of(call for call in self.calls if call.ok)

    def _of(self, calls: Iterable[CallRecord]) -> Self:
        return replace(self, calls=tuple(calls))

    @property
    def success_ratio(self) -> float:
        """Give the share of calls that got a whole answer; nan without calls."""
        return sum(call.ok for call in self.calls) / len(self.calls) if self.calls else math.nan

    @property
    def latency(self) -> Summary:
        """Sum up how long the calls took, those without an answer too (`answered.latency` leaves them out)."""
        return Summary.of(call.seconds for call in self.calls)

    @property
    def first_token(self) -> Summary:
        """Sum up how long the first bytes of the answers took."""
        return Summary.of(
            call.to_first_token for call in self.calls if call.ok and call.to_first_token is not None
        )

    @property
    def outcomes(self) -> Counter[str]:
        """Count how calls ended."""
        return Counter(call.outcome for call in self.calls)

    @property
    def answered_by(self) -> Counter[str | None]:
        """Count whose answers the calls got; None is for answers that no request was sent for."""
        return Counter(call.answered_by for call in self.calls if call.ok)

    @property
    def requests(self) -> int:
        """Count the requests that were sent for these calls."""
        return sum(len(call.exchanges) for call in self.calls)

    @property
    def usd(self) -> float:
        """Give what these calls cost, in US dollars."""
        return math.fsum(call.usd for call in self.calls)

    @property
    def usd_per_answer(self) -> float:
        """Give what an answer cost, with all that was spent in vain; nan without answers."""
        answers = sum(call.ok for call in self.calls)
        return self.usd / answers if answers else math.nan

    def extra_cost_ratio(self, than: Report) -> float:
        """Give by which share an answer cost more than in another simulation."""
        return self.usd_per_answer / than.usd_per_answer - 1

    def timeline(self, every: float = 60.0) -> list[Bucket]:
        """Divide the simulation into stretches of `every` seconds."""
        if not every > 0:
            raise ValueError(f"every must be > 0 seconds, got {every!r}")
        count = max(1, math.ceil(self.ended / every))
        calls: list[list[CallRecord]] = [[] for _ in range(count)]
        for call in self.calls:
            calls[min(count - 1, int(call.started / every))].append(call)
        requests = [dict.fromkeys(self.upstreams, 0) for _ in range(count)]
        for name, upstream in self.upstreams.items():
            for at in upstream.times:
                requests[min(count - 1, int(at / every))][name] += 1
        return [
            Bucket(
                start=place * every,
                calls=len(within),
                success_ratio=mean(call.ok for call in within),
                seconds=mean(call.seconds for call in within),
                requests=requests[place],
                gauges={
                    name: mean(value for at, value in samples if place == min(count - 1, int(at / every)))
                    for name, samples in self.gauges.items()
                },
            )
            for place, within in enumerate(calls)
        ]

    def as_dict(self, *, every: float = 60.0) -> dict[str, object]:
        """Give the figures and the timeline as plain objects."""
        return {
            "calls": len(self.calls),
            "seconds": self.ended,
            "success_ratio": finite(self.success_ratio),
            "outcomes": dict(sorted(self.outcomes.items())),
            "latency": self.latency.as_dict(),
            "first_token": self.first_token.as_dict(),
            "requests": self.requests,
            "usd": self.usd,
            "usd_per_answer": finite(self.usd_per_answer),
            "upstreams": {name: upstream.as_dict() for name, upstream in self.upstreams.items()},
            "timeline": [bucket.as_dict() for bucket in self.timeline(every)],
        }

    def to_json(self, *, every: float = 60.0) -> str:
        """Write `as_dict` as JSON."""
        return json.dumps(self.as_dict(every=every))

    def __str__(self) -> str:
        return "\n".join([table({"": self}), "", *_upstream_table(self.upstreams.values())])


def table(reports: Mapping[str, Report]) -> str:
    """Set several simulations side by side, a row each: times in milliseconds, money per thousand answers."""
    width = max(map(len, reports))
    heading = "calls success      mean       p50       p95       p99  requests/call   USD/1000"
    rows = [f"{'':{width}} {heading}".rstrip()]
    for name, report in reports.items():
        latency = report.latency
        times = "".join(
            f"{value * 1000:>10.0f}" for value in (latency.mean, latency.p50, latency.p95, latency.p99)
        )
        per_call = report.requests / len(report.calls) if report.calls else math.nan
        rows.append(
            f"{name:{width}} {len(report.calls):>5} {report.success_ratio:>7.2%}{times}"
            f"{per_call:>15.3f}{report.usd_per_answer * 1000:>11.3f}"
        )
    return "\n".join(rows)


def _upstream_table(upstreams: Iterable[UpstreamReport]) -> Iterator[str]:
    rows = list(upstreams)
    width = max(len("upstream"), *(len(row.name) for row in rows))
    yield f"{'upstream':{width}} requests  in flight      mean       p99        USD  failures"
    for row in rows:
        latency = row.latency
        failures = ", ".join(f"{count} {kind}" for kind, count in row.failures.most_common())
        yield (
            f"{row.name:{width}} {row.requests:>8}{row.in_flight_max:>11}{latency.mean * 1000:>10.0f}"
            f"{latency.p99 * 1000:>10.0f}{row.usd:>11.3f}  {failures}"
        ).rstrip()
