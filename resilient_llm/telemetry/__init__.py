"""Spans, events and metrics, and the only place that talks to OpenTelemetry.

Telemetry never breaks or delays a call: what it or a user's processor raises stays in here, and nothing is
built that nobody records. Names are all in `names`; no policy decides anything in here.
"""

from resilient_llm.telemetry.listener import CallListener
from resilient_llm.telemetry.silent import AttemptTelemetry, CallTelemetry, Routing, WaitOutcome
from resilient_llm.telemetry.telemetry import Telemetry

__all__ = ["AttemptTelemetry", "CallListener", "CallTelemetry", "Routing", "Telemetry", "WaitOutcome"]
