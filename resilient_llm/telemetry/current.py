"""Make a span current around one await, and its trace known to the provider.

OpenTelemetry logs an error when a context is detached elsewhere than it was attached, which happens to a
coroutine that is closed by the garbage collector. Nothing in here is held across a yield.
"""

from __future__ import annotations

from contextvars import ContextVar, Token

from opentelemetry import context as otel
from opentelemetry import propagate
from opentelemetry.context import Context

from resilient_llm.message import Headers, Request
from resilient_llm.telemetry.safety import report

__all__ = ["Attachment", "with_trace_context"]

_here: ContextVar[None] = ContextVar("resilient_llm.telemetry.here")


class Attachment:
    """A context that is current from now until `detach`."""

    __slots__ = ("_attached", "_here")

    def __init__(self, context: Context) -> None:
        self._attached = otel.attach(context)
        self._here: Token[None] = _here.set(None)

    def detach(self) -> None:
        """Make current again what was; nothing to do where it never was current."""
        try:
            _here.reset(self._here)
        except ValueError:  # another task, or none at all, is closing the coroutine this one left
            return
        otel.detach(self._attached)


def with_trace_context(request: Request, context: Context) -> Request:
    """Give the request with headers that say which span it belongs to, as the application's propagator writes them.

    `baggage` stays here: what services tell each other about a user is not for a provider.
    """
    try:
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context)
        ours: Headers = [
            (name.lower().encode("ascii"), value.encode("ascii"))
            for name, value in carrier.items()
            if name.lower() != "baggage" and value.isascii() and value.isprintable()
        ]
    except Exception as error:  # noqa: BLE001 - a propagator may be the application's own
        report("propagation", error)
        return request
    if not ours:
        return request
    replaced = {name for name, _ in ours}
    kept = [header for header in request.headers if header[0].lower() not in replaced]
    return request.replace(headers=[*kept, *ours])
