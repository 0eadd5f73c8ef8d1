"""One line of JSON for each request, and for whatever else is logged.

What stands in it was counted by the policies; nothing of a request's content, and no key, ever does.
"""

from __future__ import annotations

import json
import logging
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import anyio

from resilient_llm.outcome import CANCELLED, Verdict
from resilient_llm.routing.route import Route
from resilient_llm.sidecar.headers import request_id

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import Headers

__all__ = ["Entry", "JSONFormatter"]

logger = logging.getLogger("resilient_llm.access")

_ANSWERED_BY = b"x-resilient-llm-target"
_MAX_NAME = 256


class Entry:
    """What is known of a request, as it goes along."""

    __slots__ = (
        "_began",
        "_call",
        "_code",
        "_refused",
        "_status",
        "left",
        "method",
        "model",
        "path",
        "request_id",
        "target",
        "tenant",
    )

    def __init__(self, method: str, headers: Headers) -> None:
        self._began = anyio.current_time()
        self._call: Call | None = None
        self._status: int | None = None
        self._code: str | None = None
        self._refused = False
        self.left = False
        """Whether the client went away before it had its answer."""
        self.method = method
        self.path = ""
        self.request_id = request_id(headers) or secrets.token_hex(8)
        self.tenant: str | None = None
        self.model: str | None = None
        self.target: str | None = None

    def refused(self, status: int, code: str) -> None:
        """Note that it was refused here."""
        self._status, self._code, self._refused = status, code, True

    def replied(self, status: int, headers: Headers) -> None:
        """Note the reply that it got."""
        self._status = status
        for name, value in headers:
            if name == _ANSWERED_BY:
                self.target = value.decode("latin-1")

    def ended(self, call: Call | None) -> None:
        """Note the call that was made of it."""
        self._call = call

    def failed(self, code: str) -> None:
        """Note that something broke."""
        self._code = code

    @property
    def outcome(self) -> str:
        """Say in a word what became of it: ok, error, refused, cancelled."""
        call = self._call
        outcome = None if call is None else call.outcome
        if outcome is CANCELLED or (self.left and (outcome is None or not outcome.ok)):
            return "cancelled"
        if self._refused:
            return "refused"
        if outcome is not None and not outcome.ok:
            unsent = call is not None and call.sent is False
            return "refused" if unsent and outcome.verdict is not Verdict.FAILURE else "error"
        return "ok" if self._status is not None and self._status < 400 and self._code is None else "error"

    def write(self) -> None:
        """Log it."""
        call = self._call
        outcome = None if call is None else call.outcome
        usage = None if outcome is None else outcome.usage
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path[:_MAX_NAME],
            "tenant": self.tenant,
            "model": None if self.model is None else self.model[:_MAX_NAME],
            "target": self.target,
            "status": self._status,
            "outcome": self.outcome,
            "error": self._code or (None if outcome is None else outcome.error_type),
            "duration": round(anyio.current_time() - self._began, 4),
        }
        if call is not None:
            if self.target is None and isinstance(call.route, Route) and call.route.last is not None:
                fields["target"] = call.route.last.target.name
            fields["attempts"] = call.attempts
            fields["retries"] = call.retries
            fields["fallbacks"] = call.fallbacks
            fields["hedges"] = call.hedges
            fields["waited"] = round(call.wait_time, 4)
            fields["cost_usd"] = round(call.cost, 8)
            if call.first_content is not None:
                fields["first_content"] = round(call.first_content, 4)
        if usage is not None:
            fields["input_tokens"] = usage.input_tokens
            fields["output_tokens"] = usage.output_tokens
        logger.info("request", extra={"fields": fields})


class JSONFormatter(logging.Formatter):
    """Write a record as one line of JSON; strings in it cannot begin a new one."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            # Names and places only: the text of an exception may hold what was sent.
            error, trace = record.exc_info[0], record.exc_info[2]
            places = []
            while trace is not None:
                places.append(f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
                trace = trace.tb_next
            line["exception"] = error.__name__
            line["traceback"] = places[-8:]
        return json.dumps(line, ensure_ascii=True, default=str)
