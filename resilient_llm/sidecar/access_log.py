"""One line of JSON for each request, and for whatever else is logged.

What stands in it was counted by the policies; nothing of a request's content, and no key, ever does.
"""

from __future__ import annotations

import json
import logging
import random
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from resilient_llm.outcome import CANCELLED, Verdict
from resilient_llm.routing.deployment import ANSWERED_BY
from resilient_llm.routing.route import Route
from resilient_llm.sidecar.headers import request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient_llm.call import Call
    from resilient_llm.sidecar.rejection import Rejection

__all__ = ["Entry", "JSONFormatter"]

logger = logging.getLogger("resilient_llm.access")

_MAX_NAME = 256
_MESSAGE = "request"
_encode = json.JSONEncoder(ensure_ascii=True, default=str).encode
_quoted = json.encoder.encode_basestring_ascii
_NUMBERS = (int, float)
_IN_ALL = _encode({"level": "info", "logger": logger.name, "message": _MESSAGE})[1:-1]
"""What all lines of the access log have in common."""


class Entry:
    """What is known of a request, as it goes along.

    Of its headers the first value of each is given; `clock` is what it is timed by.
    """

    path = ""
    tenant: str | None = None
    model: str | None = None
    target: str | None = None
    left = False
    """Whether the client went away before it had its answer."""
    untaken = False
    """Whether it went away when all of the answer was sent, and much of that still to be taken."""
    call: Call | None = None
    """The call that was made of it, if one was."""
    _status: int | None = None
    _code: str | None = None
    _refused = False
    _fields: dict[str, Any] | None = None

    def __init__(self, method: str, headers: Mapping[bytes, bytes], clock: Callable[[], float]) -> None:
        self._time = clock
        self._began = clock()
        self.method = method
        self.request_id = request_id(headers) or _any_id()

    def rename(self) -> None:
        """Take another id than the client's, which is none to be written down."""
        self.request_id = _any_id()

    def refused(self, status: int, code: str) -> None:
        """Note that it was refused here, or with a status of 5xx that nothing better could be had."""
        self._status, self._code, self._refused = status, code, status < 500

    def turned_away(self, rejection: Rejection) -> None:
        """Note that the client did not leave by itself."""
        self.left = False
        self.refused(rejection.status, rejection.code)

    def replied(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Note the reply that it got."""
        self._status = status
        target = headers.get(ANSWERED_BY)
        if target is not None:
            self.target = target.decode("latin-1")

    def failed(self, code: str) -> None:
        """Note that something broke."""
        self._code = code

    @property
    def outcome(self) -> str:
        """Say in a word what became of it: ok, error, refused, cancelled."""
        call = self.call
        outcome = None if call is None else call.outcome
        if outcome is CANCELLED or self.untaken or (self.left and (outcome is None or not outcome.ok)):
            return "cancelled"
        if self._refused:
            return "refused"
        if outcome is not None and not outcome.ok:
            unsent = call is not None and call.sent is False
            return "refused" if unsent and outcome.verdict is not Verdict.FAILURE else "error"
        return "ok" if self._status is not None and self._status < 400 and self._code is None else "error"

    def write(self) -> None:
        """Log it."""
        if logger.isEnabledFor(logging.INFO):
            logger.handle(_Record(self.fields()))

    def fields(self) -> dict[str, Any]:
        """Say what there is to say of it, once it has been answered."""
        if self._fields is not None:
            return self._fields
        call = self.call
        outcome = None if call is None else call.outcome
        usage = None if outcome is None else outcome.usage
        # Rounded to whole ten-thousandths: to decimal digits takes thrice as long.
        duration = round((self._time() - self._began) * 1e4) / 1e4
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path[:_MAX_NAME],
            "tenant": self.tenant,
            "model": None if self.model is None else self.model[:_MAX_NAME],
            "target": self.target,
            "status": self._status,
            "outcome": self.outcome,
            "error": self._code or (None if outcome is None else outcome.error_type),
            "duration": duration,
        }
        if call is not None:
            if isinstance(call.route, Route):
                answered = call.route.answered or call.route.last
                if answered is not None:  # a header of the reply that says so may be the provider's
                    fields["target"] = answered.target.name
            fields["attempts"] = call.attempts
            fields["retries"] = call.retries
            fields["fallbacks"] = call.fallbacks
            fields["hedges"] = call.hedges
            fields["waited"] = round(call.wait_time, 4) if call.wait_time else 0.0
            fields["cost_usd"] = round(call.cost, 8) if call.cost else None  # as where no price is known
            if call.first_content is not None:
                fields["first_content"] = round(call.first_content, 4)
        if usage is not None:
            fields["input_tokens"] = usage.input_tokens
            fields["output_tokens"] = usage.output_tokens
            if usage.estimated:
                fields["usage_estimated"] = True
        self._fields = fields
        return fields


def _any_id() -> str:
    return random.randbytes(8).hex()


class _Record(logging.LogRecord):
    """A record of the access log, made without finding out where it was logged: half of what one costs."""

    fields: dict[str, Any]
    _common = vars(
        logging.makeLogRecord(
            {
                "name": logger.name,
                "levelno": logging.INFO,
                "levelname": logging.getLevelName(logging.INFO),
                "msg": _MESSAGE,
            }
        )
    )

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__ = record = self._common.copy()
        record["created"] = now = time.time()  # noqa: TID251 - the wall clock, as of every record
        record["msecs"] = now % 1 * 1000
        record["fields"] = fields


class JSONFormatter(logging.Formatter):
    """Write a record as one line of JSON; strings in it cannot begin a new one."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        second = int(record.created)
        time = f"{_to_the_second(second)}.{int((record.created - second) * 1000):03}+00:00"
        if type(record) is _Record:
            return f'{{"time": "{time}", {_IN_ALL}, {_members(record.fields)}}}'
        line: dict[str, object] = {
            "time": time,
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
        return _encode(line)


def _members(fields: Mapping[str, object]) -> str:
    """Give what stands between the braces of an object: as `_encode` does, which takes half as long again."""
    values = [
        _quoted(value)
        if type(value) is str
        else "null"
        if value is None
        else value
        if type(value) in _NUMBERS
        else _encode(value)
        for value in fields.values()
    ]
    return _form(tuple(fields)) % tuple(values)


@lru_cache(maxsize=64)
def _form(names: tuple[str, ...]) -> str:
    """Give members of these names, to be filled in with the values."""
    return ", ".join([f"{_quoted(name)}: ".replace("%", "%%") + "%s" for name in names])


@lru_cache(maxsize=4)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
