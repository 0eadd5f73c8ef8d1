"""The Anthropic Messages API, at Anthropic and where Azure, Amazon and Vertex AI host it."""

from __future__ import annotations

import json
from typing import ClassVar

from resilient_llm._kept import LONGEST_MODEL
from resilient_llm.core import sse
from resilient_llm.location import locate
from resilient_llm.message import JSONObject, Request
from resilient_llm.profile import Profile
from resilient_llm.providers.answer import Answer, EventKind, count, objects, written
from resilient_llm.providers.base import BaseDialect, asked, kept_profile, text

__all__ = ["ANTHROPIC", "AnthropicDialect"]

_OPERATIONS = {
    "/v1/messages": "chat",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/complete": "text_completion",
}
_ENDINGS = (*_OPERATIONS, "/v1/messages/batches")
_VERTEX = "/publishers/anthropic/models/"
_VERTEX_METHODS = frozenset({"rawPredict", "streamRawPredict"})

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicDialect(BaseDialect):
    """Speak the Messages API.

    A stream is whole after `message_stop`, and also, since compatible servers leave that out, when it ends
    properly with a `stop_reason`, which the model gives only when it has said everything.
    """

    name: ClassVar[str] = "anthropic"
    provider: ClassVar[str] = "anthropic"

    def matches(self, request: Request) -> bool:
        """Tell by the route, the host or, where neither says anything, the header that must be there."""
        location = locate(request.url)
        return (
            location.path.endswith(_ENDINGS)
            or location.provider == "anthropic"
            or _VERTEX in location.path
            or (location.provider is None and request.header(b"anthropic-version") is not None)
        )

    def profile(self, request: Request) -> Profile:
        """Say what a request asks for; a turn of a stored thread can be taken only once."""
        location = locate(request.url)
        operation, model, method = _operation(location.path)
        if operation is None or request.method != "POST":
            return super().profile(request)
        body = request.json
        model = text(body.get("model")) or model
        stream = asked(body.get("stream")) or method == "streamRawPredict"
        repeat_safe = body.get("thread") is None
        resumable = location.path.endswith("/v1/messages") and body.get("messages") is not None
        make = kept_profile if model is None or len(model) <= LONGEST_MODEL else kept_profile.__wrapped__
        return make(location.provider or self.provider, operation, model, stream, repeat_safe, resumable)

    def recognises(self, body: JSONObject) -> bool:
        """Tell by its type whether a reply or an event is one of this API's."""
        kind = body.get("type")
        return kind == "message" or (isinstance(kind, str) and kind.startswith(_EVENTS))

    def read_event(self, event: str, body: JSONObject, answer: Answer) -> EventKind:  # noqa: ARG002 - in the body too
        """Read an event of a message, or of a text completion."""
        kind = body.get("type")
        if kind == "content_block_delta":
            return EventKind.CONTENT if _read_delta(body.get("delta"), answer) else EventKind.META
        if kind == "content_block_start":
            return EventKind.CONTENT if _read_block(body.get("content_block"), answer) else EventKind.META
        if kind == "message_start":
            message = body.get("message")
            if isinstance(message, dict):
                answer.begin()
                _read_message(message, answer)
        elif kind == "message_delta":
            delta = body.get("delta")
            answer.finish(delta.get("stop_reason") if isinstance(delta, dict) else None)
            _read_usage(body.get("usage"), answer)
        elif kind == "completion":
            return EventKind.CONTENT if _read_completion(body, answer) else EventKind.META
        return EventKind.END if kind == "message_stop" else EventKind.META

    def read_body(self, body: JSONObject, answer: Answer) -> None:
        """Read a message, or a text completion."""
        _read_message(body, answer)
        _read_completion(body, answer)
        for block in objects(body.get("content")):
            _read_block(block, answer)

    def error_body(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """Write `{"type": "error", "error": {"type", "message"}}`; a code stands in the error's details."""
        kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
        error: dict[str, object] = {"type": kind, "message": message}
        if code is not None:
            error["details"] = {"error_code": code}
        return json.dumps({"type": "error", "error": error, "request_id": None}).encode()

    def error_event(
        self,
        request: Request,  # noqa: ARG002 - all streams are alike
        status: int,
        message: str,
        *,
        code: str | None = None,
        sequence: int | None = None,  # noqa: ARG002
    ) -> bytes:
        """Write the error's body as an `error` event."""
        return sse.encode(self.error_body(status, message, code=code), event="error")


_EVENTS = ("content_block_", "message_")
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _read_delta(delta: object, answer: Answer) -> bool:
    """Read what is added to a block; tell whether that is anything a reader would see."""
    if not isinstance(delta, dict) or delta.get("type") == "signature_delta":
        return False
    kind = delta.get("type")
    name = _DELTAS.get(kind) if isinstance(kind, str) else None
    if name is None:  # citations, and whatever there will be
        answer.do()
        return True
    added = delta.get(name)
    if not isinstance(added, str) or not added:
        return False
    {"text": answer.say, "thinking": answer.think}.get(name, answer.do)(added)
    return True


def _read_block(block: object, answer: Answer) -> bool:
    """Read a block that begins, or is whole; tell whether there is anything in it yet.

    The name of a tool is something: the model has decided to call it.
    """
    if not isinstance(block, dict):
        return False
    kind = block.get("type")
    if kind in ("text", "thinking"):
        said = block.get(kind)
        if isinstance(said, str) and said:
            (answer.say if kind == "text" else answer.think)(said)
            return True
        return False
    answer.do(written(block.get("input")))
    return True


def _read_message(message: JSONObject, answer: Answer) -> None:
    answer.identify(model=message.get("model"), id=message.get("id"))
    answer.finish(message.get("stop_reason"))
    _read_usage(message.get("usage"), answer)


def _read_completion(body: JSONObject, answer: Answer) -> bool:
    """Read a text completion, or a piece of one; tell whether there is any text."""
    answer.identify(model=body.get("model"), id=body.get("id"))
    answer.finish(body.get("stop_reason"))
    said = body.get("completion")
    if isinstance(said, str) and said:
        answer.say(said)
        return True
    return False


def _read_usage(usage: object, answer: Answer) -> None:
    """Read counts, which are of the whole message so far; those of input exclude what a cache took or gave."""
    if not isinstance(usage, dict):
        return
    read = count(usage, "input_tokens")
    cached = count(usage, "cache_read_input_tokens")
    if read is not None:
        read += (cached or 0) + (count(usage, "cache_creation_input_tokens") or 0)
    answer.count_tokens(
        input=read,
        output=count(usage, "output_tokens"),
        cached=cached,
        reasoning=count(usage.get("output_tokens_details"), "thinking_tokens"),
    )


def _operation(path: str) -> tuple[str | None, str | None, str]:
    """Read operation, model and method out of a path; only Vertex AI's names a model and a method."""
    vertex = path.partition(_VERTEX)[2]
    if vertex:
        model, _, method = vertex.partition(":")
        return ("chat" if method in _VERTEX_METHODS else None), model, method
    for ending, operation in _OPERATIONS.items():
        if path.endswith(ending):
            return operation, None, ""
    return None, None, ""


ANTHROPIC = AnthropicDialect()
