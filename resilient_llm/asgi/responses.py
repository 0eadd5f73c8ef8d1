"""What a client gets to see when its request is refused or out of time.

Fixed sentences by status and a stable word for the reason: never the text of an exception, which may hold
names, keys or content. Whether anything can still be sent is the exchange's to know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal, TypeAlias

from starlette.types import Message, Scope

from resilient_llm.core.sse import encode
from resilient_llm.errors import DeadlineExceededError, RejectedError
from resilient_llm.message import NO_RETRY, retry_after
from resilient_llm.providers import ANTHROPIC, OPENAI

__all__ = ["FORMATS", "ErrorFormat", "Refusal", "error_event", "error_response"]

ErrorFormat: TypeAlias = Literal["problem", "openai", "anthropic"]
"""problem+json (RFC 9457), or the error objects that a provider's SDK reads."""

Refusal: TypeAlias = RejectedError | DeadlineExceededError

_DETAIL: Mapping[int, str] = {
    401: "The request names no tenant, or one that is not known here.",
    429: "Too many of your requests are running or waiting. Try again later.",
    503: "The service has no capacity for the request now. Try again later.",
    504: "The request was not done by its deadline.",
}


_WHY: Mapping[str, str] = {
    "draining": "The service is shutting down. Try again.",
    "rate_limited": "You are over a rate limit. Try again later.",
    "cost_exceeds_capacity": "The request is larger than your rate limit ever allows.",
}
"""By reason, where the status alone would say the wrong thing."""


def _problem(status: int, detail: str, *, code: str) -> bytes:
    problem = {"title": HTTPStatus(status).phrase, "status": status, "detail": detail, "code": code}
    return json.dumps(problem).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    content_type: bytes
    body: Callable[..., bytes]
    event: str | None = "error"


FORMATS: Mapping[ErrorFormat, _Format] = {
    "problem": _Format(content_type=b"application/problem+json", body=_problem),
    "openai": _Format(content_type=b"application/json", body=OPENAI.error_body, event=None),
    "anthropic": _Format(content_type=b"application/json", body=ANTHROPIC.error_body),
}


def error_response(error: Refusal, scope: Scope, error_format: ErrorFormat) -> tuple[Message, Message]:
    """Make the messages of the response that says why a request was refused.

    `Retry-After` is in whole seconds, rounded up, at least 1. `x-should-retry: false` keeps SDKs from
    retrying by themselves what is limited here.
    """
    status, body = _status(error), _body(error, error_format)
    headers = [
        (b"content-type", FORMATS[error_format].content_type),
        (b"content-length", str(len(body)).encode()),
        NO_RETRY,
    ]
    if isinstance(error, RejectedError):
        headers += retry_after(error.retry_after)
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110 wants one with every 401
    return (
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body},
    )


def error_event(error: Refusal, error_format: ErrorFormat) -> bytes:
    """Make the event that ends an event stream which ran out of time."""
    return encode(_body(error, error_format), event=FORMATS[error_format].event)


def _status(error: Refusal) -> int:
    return error.status if isinstance(error, RejectedError) else HTTPStatus.GATEWAY_TIMEOUT


def _body(error: Refusal, error_format: ErrorFormat) -> bytes:
    status = _status(error)
    code = error.reason if isinstance(error, RejectedError) else "deadline_exceeded"
    detail = _WHY.get(code) or _DETAIL.get(status, "The request was refused.")
    return FORMATS[error_format].body(status, detail, code=code)
