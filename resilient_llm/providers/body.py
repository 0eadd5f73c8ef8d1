"""Read the body of a reply that came in one piece, and say what it means.

Status and content type decide what a reply is, whatever was asked for. Reading it from the network, and how
much of it, is the shell's business; so is everything that is done about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient_llm.core.sse import DEFAULT_MAX_EVENT_SIZE
from resilient_llm.message import Headers, header
from resilient_llm.outcome import SUCCESS, Outcome, Verdict
from resilient_llm.providers.answer import Answer, objects
from resilient_llm.providers.content import decode_body
from resilient_llm.providers.event_reader import classify_error
from resilient_llm.providers.problem import parse, reports_error
from resilient_llm.providers.stream_reader import StreamReader

if TYPE_CHECKING:
    from resilient_llm.providers.base import Dialect

__all__ = ["is_event_stream", "is_json", "read_body"]

_JSON_OPERATIONS = frozenset(
    {
        "chat",
        "count_tokens",
        "embeddings",
        "generate_content",
        "image_generation",
        "moderation",
        "rerank",
        "text_completion",
    }
)
_FIRST_ERROR = 400
_OPAQUE = (b"text/", b"application/octet-stream")
_FIELDS = (b"data:", b"event:", b":")


def is_event_stream(headers: Headers) -> bool:
    """Tell whether a reply says that it is a stream of server-sent events."""
    return _media_type(headers) == b"text/event-stream"


def is_json(headers: Headers) -> bool:
    """Tell whether a reply says that it is JSON in one piece."""
    kind = _media_type(headers)
    return kind == b"application/json" or kind.endswith(b"+json")


def read_body(
    dialect: Dialect,
    status: int,
    headers: Headers,
    body: bytes,
    *,
    operation: str = "request",
    max_size: int = DEFAULT_MAX_EVENT_SIZE,
) -> tuple[Outcome, Answer]:
    """Say what a whole reply means, and what it tells of itself.

    `body` is as it came, all of it; beyond `max_size` bytes, decoded, it is not looked at. `operation` is what
    was asked for (see `Profile`). A FAILURE of a 200 that names no error of its own is of type "empty_body",
    "truncated" (JSON that breaks off) or "unexpected_body" (anything else where a JSON object was asked for, as
    from a proxy that answers with a page of its own). Never raises.
    """
    answer = Answer()
    decoded = decode_body(headers, body, max_size=max_size + 1)
    if status >= _FIRST_ERROR:
        return dialect.classify(status, headers, decoded), answer
    if not 200 <= status < 300 or status in (204, 205) or decoded is None or len(decoded) > max_size:
        return SUCCESS, answer
    parsed = parse(decoded)
    if not isinstance(parsed, dict | list):
        return _read_other(dialect, status, headers, decoded, operation)
    for item in objects(parsed if isinstance(parsed, list) else [parsed]):  # Gemini writes streams as lists
        if reports_error(item):
            return _with_usage(classify_error(dialect, status, headers, item), answer), answer
        dialect.read_body(item, answer)
        if answer.problem is not None:
            problem = {"error": answer.problem}
            return _with_usage(classify_error(dialect, status, headers, problem), answer), answer
    return _with_usage(SUCCESS, answer), answer


def _read_other(
    dialect: Dialect, status: int, headers: Headers, body: bytes, operation: str
) -> tuple[Outcome, Answer]:
    """Read what is not JSON, or not all of it."""
    start = body.lstrip()
    if start.startswith(_FIELDS):  # a stream that does not say so
        reader = StreamReader(dialect, status=status)
        reader.feed(body)
        return reader.close(), reader.answer
    kind = _media_type(headers)
    error_type = None
    if not body:
        error_type = None if operation == "request" else "empty_body"
    elif start.startswith(b"null") or parse(body) is not None:
        error_type = "unexpected_body" if operation in _JSON_OPERATIONS else None
    elif is_json(headers):
        error_type = "truncated"
    elif operation in _JSON_OPERATIONS and (not kind or kind.startswith(_OPAQUE)):
        error_type = "truncated" if start.startswith((b"{", b"[")) else "unexpected_body"
    if error_type is None:
        return SUCCESS, Answer()
    failure = Outcome(
        verdict=Verdict.FAILURE, error_type=error_type, status=status, retryable=True, ambiguous=True
    )
    return failure, Answer()


def _with_usage(outcome: Outcome, answer: Answer) -> Outcome:
    reported = outcome.ok and answer.output_tokens is not None
    return replace(outcome, usage=answer.usage if reported else answer.estimate())


def _media_type(headers: Headers) -> bytes:
    return (header(headers, b"content-type") or b"").partition(b";")[0].strip().lower()
