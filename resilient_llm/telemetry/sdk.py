"""Whether the application has configured an SDK: asked anew for every call, so it must cost next to nothing.

Asking OpenTelemetry for its global providers looks into the environment for as long as there are none, which
takes microseconds. What it keeps them in is looked at first; should that move, asking still gives the answer.
"""

from __future__ import annotations

import sys

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

__all__ = ["measuring", "nothing_global", "tracing"]

_meters = sys.modules.get("opentelemetry.metrics._internal", metrics)


def nothing_global() -> bool:
    """Tell whether there are no global providers for certain."""
    try:
        return trace._TRACER_PROVIDER is None and _meters._METER_PROVIDER is None
    except AttributeError:
        return False


def tracing(provider: TracerProvider | None) -> bool:
    """Tell whether spans of `provider`, or else of the global one, go anywhere."""
    return _is_real(trace.get_tracer_provider() if provider is None else provider)


def measuring(provider: MeterProvider | None) -> bool:
    """Tell whether measurements of `provider`, or else of the global one, go anywhere."""
    return _is_real(metrics.get_meter_provider() if provider is None else provider)


def _is_real(provider: object) -> bool:
    """Tell an SDK's provider from the API's own stand-ins, which record nothing."""
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
