"""How a pipeline is observed: the application's choices, and a recorder for each call.

Configuring the SDK is the application's, whenever it likes; until then nothing is built and nothing recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from opentelemetry import trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from resilient_llm._options import flag, offers, one_of, synchronous, takes
from resilient_llm._options import names as label_values
from resilient_llm.errors import ConfigurationError
from resilient_llm.telemetry import names
from resilient_llm.telemetry.gauges import Merge, Observe
from resilient_llm.telemetry.instruments import instruments_of, scope_version
from resilient_llm.telemetry.listener import CallListener, ListenedCall
from resilient_llm.telemetry.metrics import Metrics
from resilient_llm.telemetry.names import Semconv
from resilient_llm.telemetry.recorder import CallRecorder
from resilient_llm.telemetry.safety import report
from resilient_llm.telemetry.sdk import measuring, nothing_global, tracing
from resilient_llm.telemetry.silent import SILENT, CallTelemetry

__all__ = ["Telemetry"]


class Telemetry:
    """Make spans and metrics for the calls of a pipeline.

    Providers are the application's global ones unless given. `propagate` puts each attempt's trace context into
    its request's headers; `record_tenant=False` leaves the tenant out of spans.

    Metric labels are few: `models` are the model names that become one, all others being `other` (by default
    the first 100 seen do); `tenants` likewise, by default none. `semconv` is the set of names for the metrics of
    the GenAI conventions: "released", or the newer "inference".

    `listener` makes a `CallListener` for each call, which hears of it whether or not there is an SDK.

    Raises `ConfigurationError` for options that cannot work.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        semconv: Semconv = "released",
        propagate: bool = True,
        record_tenant: bool = True,
        models: Collection[str] | None = None,
        tenants: Collection[str] | None = None,
        listener: Callable[[], CallListener] | None = None,
    ) -> None:
        offers(("get_tracer",), "OpenTelemetry's providers", none=True, tracer_provider=tracer_provider)
        offers(("get_meter",), "OpenTelemetry's providers", none=True, meter_provider=meter_provider)
        one_of(names.METRICS, semconv=semconv)
        flag(propagate=propagate, record_tenant=record_tenant)
        _check_labels(models=models, tenants=tenants)
        if listener is not None and not callable(listener):
            raise ConfigurationError(
                f"listener={listener!r}: allowed are functions that make a CallListener, and None"
            )
        synchronous(listener=listener)
        takes(0, listener=listener)
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._all_global = tracer_provider is None and meter_provider is None
        self._tracer = trace.get_tracer(names.SCOPE, scope_version(), tracer_provider)
        self._metrics = Metrics(
            instruments_of(meter_provider), semconv=semconv, models=models, tenants=tenants
        )
        self._propagate = propagate
        self._record_tenant = record_tenant
        self.listener = listener
        """What makes the listener of each call, if there is one."""

    def relabel(self, *, models: Collection[str] | None, tenants: Collection[str] | None) -> None:
        """Have other models and tenants become labels, as given at first; what was measured stays as it is.

        Raises `ConfigurationError` for what is no collection of names.
        """
        _check_labels(models=models, tenants=tenants)
        self._metrics.relabel(models=models, tenants=tenants)

    def begin(self) -> CallTelemetry:
        """Make the recorder of one call; one that does nothing while there is no SDK, and no listener."""
        recorder = SILENT if self._all_global and nothing_global() else self._recorder()
        if self.listener is None:
            return recorder
        try:
            return ListenedCall(recorder, self.listener())
        except Exception as error:  # noqa: BLE001 - the listener is the application's
            report("listener", error)
            return recorder

    def _recorder(self) -> CallTelemetry:
        traced, measured = tracing(self._tracer_provider), measuring(self._meter_provider)
        if not traced and not measured:
            return SILENT
        return CallRecorder(
            self._tracer if traced else None,
            self._metrics if measured else None,
            propagate=self._propagate,
            record_tenant=self._record_tenant,
        )

    def request_refused(self, code: str) -> None:
        """Count a request that was refused before it was a call; `code` is one of a few, and a label."""
        if measuring(self._meter_provider):
            self._metrics.request_refused(code)

    def transition(self, name: str, from_: str, to: str, reason: str) -> None:
        """Count a circuit's change of state that no call brought about."""
        if measuring(self._meter_provider):
            self._metrics.transition(name, from_, to, reason)

    def observe(
        self, name: str, observe: Observe, unit: str, description: str, *, merge: Merge = sum
    ) -> None:
        """Report a gauge from a bound method for as long as its owner lives.

        `merge` makes one value of several that are reported under the same labels. A label for the tenant is left
        out, or `other`, as it is of other metrics, and what it told apart is merged.
        """
        try:
            self._metrics.instruments.gauges.add(
                f"{names.SCOPE}.{name}",
                observe,
                unit=unit,
                description=description,
                merge=merge,
                tenants=self._metrics.tenants,
            )
        except Exception as error:  # noqa: BLE001 - the meter is the application's
            report(f"gauge {name}", error)


def _check_labels(**values: Collection[str] | None) -> None:
    """Raise `ConfigurationError` for anything but names; of one string each character would be one."""
    label_values(**{option: given for option, given in values.items() if given is not None})
