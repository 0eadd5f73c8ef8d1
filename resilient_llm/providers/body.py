"""Read the body of a reply that came in one piece, and say what it means.

Status and content type decide what a reply is, whatever was asked for. Reading it from the network, and how
much of it, is the shell's business; so is everything that is done about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient_llm.message import Headers, JSONObject, header
from resilient_llm.outcome import SUCCESS, Outcome
from resilient_llm.providers.answer import Answer, objects
from resilient_llm.providers.content import ContentDecoder, decode_body
from resilient_llm.providers.event_reader import classify_error, fault
from resilient_llm.providers.problem import parse, reports_error
from resilient_llm.providers.stream_reader import StreamReader

if TYPE_CHECKING:
    from resilient_llm.providers.base import Dialect

__all__ = [
    "EVENT_STREAM",
    "MODEL_OPERATIONS",
    "is_event_stream",
    "is_json",
    "media_type",
    "read_body",
]

MODEL_OPERATIONS = frozenset({"chat", "embeddings", "generate_content", "text_completion"})
"""The operations of which every answer has a shape that is known, in the dialects that mark the end of a stream."""

# Of every answer of theirs, and of what servers compatible with them make of it, one of these is a part.
_PARTS = frozenset(
    {
        "candidates",
        "choices",
        "completion",
        "content",
        "data",
        "embedding",
        "embeddings",
        "id",
        "message",
        "model",
        "object",
        "output",
        "outputs",
        "promptFeedback",
        "response",
        "results",
        "type",
        "usage",
        "usageMetadata",
    }
)

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
_TRANSCRIBING = frozenset({"transcription", "translation"})
EVENT_STREAM = b"text/event-stream"

_FIRST_ERROR = 400
_EMPTY = (204, 205)
_OPAQUE = (b"text/", b"application/octet-stream")
_FIELDS = (b"data:", b"event:", b":")
_STATEFUL = frozenset({"interaction", "response"})
"""Objects that outlive their reply, and tell themselves what became of them."""
_MAX_BODY = 8 * 1024 * 1024


def is_event_stream(headers: Headers) -> bool:
    """Tell whether a reply says that it is a stream of server-sent events."""
    return media_type(headers) == EVENT_STREAM


def is_json(kind: bytes) -> bool:
    """Tell whether a media type is that of JSON in one piece."""
    return kind == b"application/json" or kind.endswith(b"+json")


def media_type(headers: Headers) -> bytes:
    """Give the media type that a reply says it is of, in lower case and without parameters; empty for none."""
    return (header(headers, b"content-type") or b"").partition(b";")[0].strip().lower()


def read_body(
    dialect: Dialect,
    status: int,
    headers: Headers,
    body: bytes,
    *,
    operation: str = "request",
    streamed: bool | None = None,
    max_size: int = _MAX_BODY,
) -> tuple[Outcome, Answer]:
    """Say what a whole reply means, and what it tells of itself.

    `body` is as it came, all of it; beyond `max_size` bytes, decoded, it is not looked at. `operation` is what
    was asked for (see `Profile`), and `streamed` whether in a stream of events, `None` where it may be either. A
    FAILURE of a 2xx that names no error of its own is of type "empty_body", "truncated" (JSON that breaks off) or
    "unexpected_body" (anything else where a JSON object was asked for, as from a proxy that answers with a page of
    its own; a stream in place of an answer, or the other way about; JSON with nothing of an answer in it). Never
    raises.
    """
    decoded = decode_body(headers, body, max_size=max_size + 1)
    if status >= _FIRST_ERROR:
        return dialect.classify(status, headers, decoded), Answer()
    if not 200 <= status < 300 or (decoded is not None and len(decoded) > max_size):
        return SUCCESS, Answer()
    known = operation in MODEL_OPERATIONS and dialect.marks_end
    if decoded is None:
        false = known and _is_false(headers, body)
        return (fault("unexpected_body", status) if false else SUCCESS), Answer()
    if status in _EMPTY:
        return (fault("empty_body", status) if known else SUCCESS), Answer()
    parsed = parse(decoded)
    answer = Answer()
    if isinstance(parsed, dict):
        outcome = _read_object(dialect, status, headers, parsed, answer)
        strange = _PARTS.isdisjoint(parsed)
    elif isinstance(parsed, list):  # Gemini writes streams as lists
        items = objects(parsed)
        read = (_read_object(dialect, status, headers, item, answer) for item in items)
        outcome = next((outcome for outcome in read if outcome is not SUCCESS), SUCCESS)
        strange = all(map(_PARTS.isdisjoint, items))
    else:
        return _read_other(dialect, status, headers, decoded, operation, streamed=streamed)
    if outcome is SUCCESS and (streamed or (known and strange)):
        outcome = fault("unexpected_body", status)
    return _with_usage(outcome, answer), answer


def _read_object(
    dialect: Dialect, status: int, headers: Headers, item: JSONObject, answer: Answer
) -> Outcome:
    """Read an object of a reply, and say what it means."""
    tells = item.get("status") == "failed" and item.get("object") in _STATEFUL
    if not tells and reports_error(item):
        return classify_error(dialect, status, headers, item)
    dialect.read_body(item, answer)
    if answer.problem is None:
        return SUCCESS
    return replace(classify_error(dialect, status, headers, {"error": answer.problem}), answered=True)


def _is_false(headers: Headers, body: bytes) -> bool:
    """Tell whether a body is not in the encoding that its headers name."""
    decoder = ContentDecoder(headers)
    decoder.feed(body)
    return decoder.false


def _read_other(
    dialect: Dialect, status: int, headers: Headers, body: bytes, operation: str, *, streamed: bool | None
) -> tuple[Outcome, Answer]:
    """Read what is not JSON, or not all of it."""
    start = body.lstrip()
    if start.startswith(_FIELDS):  # a stream that does not say so
        reader = StreamReader(dialect, status=status)
        reader.feed(body)
        outcome = reader.close()
        if outcome.ok and streamed is False:
            outcome = replace(fault("unexpected_body", status), usage=outcome.usage)
        return outcome, reader.answer
    kind = media_type(headers)
    error_type = None
    if not body:
        silence = operation in _TRANSCRIBING and kind.startswith(b"text/")  # nothing was said in it
        error_type = None if silence or operation == "request" else "empty_body"
    elif start.startswith(b"null") or parse(body) is not None:
        error_type = "unexpected_body" if operation in _JSON_OPERATIONS else None
    elif is_json(kind):
        error_type = "truncated"
    elif operation in _JSON_OPERATIONS and (not kind or kind.startswith(_OPAQUE)):
        error_type = "truncated" if start.startswith((b"{", b"[")) else "unexpected_body"
    if error_type is None:
        return SUCCESS, Answer()
    return fault(error_type, status), Answer()


def _with_usage(outcome: Outcome, answer: Answer) -> Outcome:
    reported = answer.output_tokens is not None
    usage = answer.usage if reported else answer.estimate()
    if outcome is SUCCESS:
        return Outcome(verdict=SUCCESS.verdict, usage=usage)
    return replace(outcome, usage=usage)
