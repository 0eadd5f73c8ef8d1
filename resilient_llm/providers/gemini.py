"""Google's Gemini API and Vertex AI, except where they speak OpenAI's or Anthropic's dialect."""

from __future__ import annotations

import json
from typing import ClassVar, NamedTuple

from resilient_llm.location import locate
from resilient_llm.message import JSONObject, Request
from resilient_llm.profile import Profile
from resilient_llm.providers.answer import Answer, EventKind, count, objects, written
from resilient_llm.providers.base import BaseDialect, Framing, asked, stored, text

__all__ = ["GEMINI", "GeminiDialect"]


class _Method(NamedTuple):
    operation: str
    stream: bool = False


# What is missing here starts a job (batchGenerateContent, predictLongRunning) or changes something.
_METHODS = {
    "generateContent": _Method("generate_content"),
    "streamGenerateContent": _Method("generate_content", stream=True),
    "embedContent": _Method("embeddings"),
    "batchEmbedContents": _Method("embeddings"),
    "countTokens": _Method("count_tokens"),
}
_PROVIDERS = frozenset({"gcp.gemini", "gcp.vertex_ai"})

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class GeminiDialect(BaseDialect):
    """Speak generateContent and the Interactions API.

    A stream of generateContent has no terminal marker: it is whole when it ends properly and every candidate
    that began has a `finishReason`. One of an interaction is whole after `interaction.completed`.
    """

    name: ClassVar[str] = "gemini"
    provider: ClassVar[str] = "gcp.gemini"

    def matches(self, request: Request) -> bool:
        """Tell by the method that ends the path, or by the host."""
        location = locate(request.url)
        return location.path.rpartition(":")[2] in _METHODS or location.provider in _PROVIDERS

    def profile(self, request: Request) -> Profile:
        """Say what a request asks for; an interaction is safe to repeat unless it is to be kept."""
        location = locate(request.url)
        if request.method != "POST":
            return super().profile(request)
        provider = location.provider or self.provider
        body = request.json
        if location.path.endswith("/interactions"):
            return Profile(
                provider=provider,
                operation="generate_content",
                model=text(body.get("model")) or text(body.get("agent")),
                stream=asked(body.get("stream")),
                repeat_safe=not stored(body),
            )
        resource, _, name = location.path.rpartition(":")
        method = _METHODS.get(name)
        if method is None:
            return super().profile(request)
        return Profile(
            provider=provider,
            operation=method.operation,
            model=resource.rpartition("/")[2],
            stream=method.stream,
        )

    def framing(self, request: Request) -> Framing:
        """Say how a stream is written: generateContent's in an array, unless the URL asks for events."""
        path, _, query = request.url.partition("?")
        asked = path.endswith("/interactions") or "alt=sse" in query.split("&")
        return "events" if asked else "array"

    def recognises(self, body: JSONObject) -> bool:
        """Tell by its fields whether a reply or an event is one of these APIs'."""
        return not _FIELDS.isdisjoint(body)

    def read_event(self, event: str, body: JSONObject, answer: Answer) -> EventKind:  # noqa: ARG002 - in the body too
        """Read a part of generateContent's reply, or an event of an interaction."""
        kind = body.get("event_type")
        if isinstance(kind, str):
            return _read_interaction_event(kind, body, answer)
        return EventKind.CONTENT if _read_response(body, answer) else EventKind.META

    def read_body(self, body: JSONObject, answer: Answer) -> None:
        """Read generateContent's reply, or an interaction."""
        if body.get("object") == "interaction":
            _read_interaction(body, answer)
        else:
            _read_response(body, answer)

    def error_body(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """Write `{"error": {"code", "message", "status"}}`; a code stands in the details as a reason."""
        kind = _STATUSES.get(status) or ("INTERNAL" if status >= 500 else "FAILED_PRECONDITION")
        error: dict[str, object] = {"code": status, "message": message, "status": kind}
        if code is not None:
            error["details"] = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code}]
        return json.dumps({"error": error}).encode()


_FIELDS = frozenset({"candidates", "event_type", "promptFeedback", "usageMetadata"})
_SILENT = frozenset({"thought", "thoughtSignature"})


def _read_response(body: JSONObject, answer: Answer) -> bool:
    """Read a reply or a part of one; tell whether the model says anything in it."""
    answer.identify(model=body.get("modelVersion"), id=body.get("responseId"))
    _read_usage(body.get("usageMetadata"), answer)
    feedback = body.get("promptFeedback")
    if isinstance(feedback, dict) and not body.get("candidates"):
        reason = feedback.get("blockReason")
        if reason:  # what other providers answer with a 400; here an SDK looks into the answer for it
            answer.problem = {"code": "content_filter", "message": f"the prompt was blocked: {reason}"}
    said = False
    for candidate in objects(body.get("candidates")):
        index = count(candidate, "index") or 0
        answer.begin(index)
        content = candidate.get("content")
        parts = content.get("parts") if isinstance(content, dict) else None
        for part in objects(parts):
            said = _read_part(part, answer, index) or said
        answer.finish(candidate.get("finishReason"), index)
    return said


def _read_part(part: JSONObject, answer: Answer, index: int) -> bool:
    said = part.get("text")
    if isinstance(said, str) and said:
        if part.get("thought"):
            answer.think(said)
        else:
            answer.say(said, index)
        return True
    if not any(value for name, value in part.items() if name not in _SILENT):
        return False
    call = part.get("functionCall")
    answer.do(written(call))
    return True


def _read_usage(usage: object, answer: Answer) -> None:
    """Read counts, which are of the whole reply so far; thinking is counted apart."""
    read = count(usage, "promptTokenCount")
    output = count(usage, "candidatesTokenCount")
    thought = count(usage, "thoughtsTokenCount")
    if read is not None:
        read += count(usage, "toolUsePromptTokenCount") or 0
    if thought is not None:
        output = (output or 0) + thought
    answer.count_tokens(
        input=read, output=output, cached=count(usage, "cachedContentTokenCount"), reasoning=thought
    )


def _read_interaction_event(kind: str, body: JSONObject, answer: Answer) -> EventKind:
    interaction = body.get("interaction")
    if isinstance(interaction, dict):
        _read_interaction(interaction, answer)
    delta = body.get("delta")
    if kind.endswith(".delta") and isinstance(delta, dict):
        if delta.get("type") == "thought_signature":
            return EventKind.META
        said = delta.get("text")
        if isinstance(said, str):
            answer.say(said)
            return EventKind.CONTENT if said else EventKind.META
        answer.do()
        return EventKind.CONTENT
    return EventKind.END if kind == "interaction.completed" else EventKind.META


def _read_interaction(interaction: JSONObject, answer: Answer) -> None:
    """Read an interaction, which is begun until its status says otherwise."""
    answer.identify(model=interaction.get("model"), id=interaction.get("id"))
    answer.begin()
    status = interaction.get("status")
    if status == "failed":
        answer.problem = next(iter(objects(interaction.get("errors"))), {"message": "the interaction failed"})
    elif status not in ("in_progress", "queued"):
        answer.finish(status)
    usage = interaction.get("usage")
    read, total = count(usage, "total_input_tokens"), count(usage, "total_tokens")
    output = count(usage, "total_output_tokens")
    if read is not None and total is not None:
        output = max(output or 0, total - read)
    answer.count_tokens(
        input=read,
        output=output,
        cached=count(usage, "total_cached_tokens"),
        reasoning=count(usage, "total_thought_tokens"),
    )


GEMINI = GeminiDialect()
