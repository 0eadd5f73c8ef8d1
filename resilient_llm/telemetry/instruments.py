"""The instruments, made once for each meter provider and shared by all pipelines.

Clients may be made for every request; instruments, the series they begin and the bounds on these may not.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import TypeAlias

from opentelemetry import metrics
from opentelemetry.metrics import Counter, Histogram, Meter, MeterProvider
from opentelemetry.util.types import AttributeValue

from resilient_llm.outcome import Usage
from resilient_llm.telemetry import names
from resilient_llm.telemetry.gauges import Gauges
from resilient_llm.telemetry.labels import Labels
from resilient_llm.telemetry.names import GenAIMetricNames, Semconv

__all__ = ["GenAIInstruments", "Instruments", "Labelled", "instruments_of", "scope_version"]

Labelled: TypeAlias = dict[str, AttributeValue]

_SECONDS = tuple(0.01 * 2**n for n in range(14))  # 0.01 doubling to 81.92, as the conventions ask
_TOKENS = tuple(4**n for n in range(14))


class GenAIInstruments:
    """The metrics of the conventions for generative AI, under one set of names."""

    def __init__(self, meter: Meter, named: GenAIMetricNames) -> None:
        self.duration = _seconds(meter, named.duration, "Duration of a call, every attempt and wait included")
        self.first_chunk = _seconds(
            meter, named.time_to_first_chunk, "Time to the first chunk of a streamed reply"
        )
        self._usage: Histogram | None = None
        if named.token_usage is not None:
            self._usage = meter.create_histogram(
                named.token_usage,
                "{token}",
                "Tokens used by a call",
                explicit_bucket_boundaries_advisory=_TOKENS,
            )
        self._input = _tokens(meter, named.input_tokens, "Tokens sent, cached ones included")
        self._output = _tokens(meter, named.output_tokens, "Tokens received")
        self._cache_read = _tokens(
            meter, named.cache_read_tokens, "Tokens sent that the provider had in its cache"
        )

    def tokens(self, usage: Usage, labels: Labelled) -> None:
        """Record the tokens of one call; what is unknown is left out."""
        for kind, counter, tokens in (
            ("input", self._input, usage.input_tokens),
            ("output", self._output, usage.output_tokens),
            (None, self._cache_read, usage.cached_tokens),
        ):
            if tokens is None:
                continue
            if counter is not None:
                counter.add(tokens, labels)
            if self._usage is not None and kind is not None:
                self._usage.record(tokens, {**labels, names.TOKEN_TYPE: kind})


class Instruments:
    """Every instrument of one meter provider, its gauges' sources and the label values it has met."""

    def __init__(self, provider: MeterProvider | None) -> None:
        meter = metrics.get_meter(names.SCOPE, scope_version(), meter_provider=provider)
        self._meter = meter
        self._gen_ai: dict[Semconv, GenAIInstruments] = {}
        self.labels = Labels()
        self.gauges = Gauges(meter, self.labels)
        self.attempt_duration = _seconds(meter, names.ATTEMPT_DURATION, "Duration of one attempt")
        self.discarded_tokens = meter.create_counter(
            names.ATTEMPT_DISCARDED_TOKENS, "{token}", "Tokens of attempts of which the caller got nothing"
        )
        self.wait_duration = _seconds(meter, names.WAIT_DURATION, "Time a call waited for a limiter")
        self.retry_delay = _seconds(
            meter, names.CALL_RETRY_DELAY, "Time a call with retries spent in backoff"
        )
        self.retries = meter.create_counter(names.CALL_RETRIES, "{retry}", "Retries made")
        self.hedges = meter.create_counter(
            names.CALL_HEDGES, "{hedge}", "Second attempts made because the first was slow"
        )
        self.fallbacks = meter.create_counter(
            names.FALLBACKS, "{fallback}", "Moves of a call to another model"
        )
        self.cost = meter.create_counter(names.COST, "{USD}", "What calls have cost, where prices are known")
        self.rejections = meter.create_counter(names.REJECTIONS, "{call}", "Calls refused on this side")
        self.request_refusals = meter.create_counter(
            names.REQUEST_REFUSALS, "{request}", "Requests refused before they were calls"
        )
        self.transitions = meter.create_counter(
            names.BREAKER_TRANSITIONS, "{transition}", "Changes of state of circuits"
        )

    def gen_ai(self, semconv: Semconv) -> GenAIInstruments:
        """Give the instruments with one set's names, made when first asked for."""
        instruments = self._gen_ai.get(semconv)
        if instruments is None:
            instruments = self._gen_ai[semconv] = GenAIInstruments(self._meter, names.METRICS[semconv])
        return instruments


_lock = threading.Lock()
_of_provider: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()


def instruments_of(provider: MeterProvider | None) -> Instruments:
    """Give the instruments of a meter provider; `None` is the application's, whenever it sets that."""
    if provider is None or provider is metrics.get_meter_provider():
        return _of_application()
    with _lock:
        instruments = _of_provider.get(provider)
        if instruments is None:
            instruments = _of_provider[provider] = Instruments(provider)
        return instruments


@cache
def _of_application() -> Instruments:
    return Instruments(None)


@cache
def scope_version() -> str:
    """Give the version that spans and metrics name as their origin's."""
    from importlib import metadata  # noqa: PLC0415 - takes longer to load than most of this package

    try:
        return metadata.version("resilient-llm")
    except metadata.PackageNotFoundError:  # run from its sources
        return ""


def _seconds(meter: Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=_SECONDS)


def _tokens(meter: Meter, name: str | None, description: str) -> Counter | None:
    return None if name is None else meter.create_counter(name, "{token}", description)
