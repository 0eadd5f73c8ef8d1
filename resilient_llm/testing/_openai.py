"""How OpenAI's API puts it: chat completions, errors and rate-limit headers.

Shapes as the openai SDK parses them; only what a text-only model sends.
"""

# ruff: noqa: ARG002 - each method takes what some dialect needs

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ._dialect import SERVER_ERROR, TOO_MANY_REQUESTS, JSONObject, Reply, event, positive_int, whole_seconds
from ._fault import Fault
from ._rate_limits import Level, Refusal

_MESSAGES = {
    400: "Invalid request.",
    401: "Incorrect API key provided.",
    403: "You are not allowed to do that.",
    404: "The model does not exist or you do not have access to it.",
    429: "Rate limit reached. Please try again later.",
    500: "The server had an error while processing your request.",
    503: "The engine is currently overloaded, please try again later.",
}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class OpenAI:
    """What OpenAI's endpoints have in common."""

    request_id_header = "x-request-id"

    def ping(self) -> bytes:
        """Return a comment."""
        return b": ping\n\n"

    def error(self, fault: Fault, request_id: str) -> JSONObject:
        """Return `{"error": ...}`."""
        status = fault.status or SERVER_ERROR
        code = _CODES.get(status) if fault.code is None else fault.code
        kind = fault.type
        if kind is None and code == "insufficient_quota":
            kind = code
        elif kind is None and status == TOO_MANY_REQUESTS:
            kind = "requests"
        elif kind is None:
            kind = "server_error" if status >= SERVER_ERROR else "invalid_request_error"
        message = fault.message or _MESSAGES.get(status) or _MESSAGES[500 if status >= SERVER_ERROR else 400]
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def error_event(self, error: JSONObject, tokens_sent: int) -> bytes:
        """Return the error body as an event."""
        return event(error)

    def refusal(self, model: str, refusal: Refusal) -> Fault:
        """Return a 429 that says which limit, how much of it was asked for, and when to come back."""
        level, wait = refusal.level, refusal.wait
        unit = {"requests": "requests per min (RPM)", "tokens": "tokens per min (TPM)"}[level.dimension]
        used = max(0.0, level.limit - level.remaining)
        numbers = f"Limit {level.limit:.0f}, Used {used:.0f}, Requested {refusal.requested:.0f}."
        if math.isinf(wait):
            headers = {}
            message = (
                f"Request too large for {model} on {unit}: {numbers} It must be reduced to run successfully."
            )
        else:
            headers = {"retry-after": str(whole_seconds(wait)), "retry-after-ms": str(math.ceil(wait * 1000))}
            message = (
                f"Rate limit reached for {model} on {unit}: {numbers} Please try again in {duration(wait)}."
            )
        return Fault(status=TOO_MANY_REQUESTS, type=level.dimension, message=message, headers=headers)

    def rate_limit_headers(self, levels: Sequence[Level], wall_clock: float) -> dict[str, str]:
        """Return `x-ratelimit-*`, with resets as durations until the bucket is full."""
        headers = {}
        for level in levels:
            headers[f"x-ratelimit-limit-{level.dimension}"] = f"{level.limit:.0f}"
            headers[f"x-ratelimit-remaining-{level.dimension}"] = str(math.floor(level.remaining))
            headers[f"x-ratelimit-reset-{level.dimension}"] = duration(level.reset)
        return headers


class OpenAIChat(OpenAI):
    """`POST /v1/chat/completions`."""

    name = "openai.chat"
    streams = True

    def prompt(self, request: JSONObject) -> object:
        """Return the messages."""
        return request.get("messages")

    def max_tokens(self, request: JSONObject) -> int | None:
        """Return `max_completion_tokens`, or `max_tokens` as older clients call it."""
        return positive_int(request, "max_completion_tokens", "max_tokens")

    def message(self, reply: Reply) -> JSONObject:
        """Return a `chat.completion`."""
        message: JSONObject = {"role": "assistant", "content": reply.text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason(reply),
        }
        return {**self._head(reply, "chat.completion"), "choices": [choice], "usage": self._usage(reply)}

    def opening(self, reply: Reply) -> list[bytes]:
        """Return the chunk that only names the role."""
        return [self._chunk(reply, {"role": "assistant", "content": "", "refusal": None})]

    def token(self, reply: Reply, index: int) -> bytes:
        """Return a content delta."""
        return self._chunk(reply, {"content": reply.tokens[index]})

    def closing(self, reply: Reply) -> list[bytes]:
        """Return the finish reason, and usage if it was asked for."""
        events = [self._chunk(reply, {}, self._finish_reason(reply))]
        if _includes_usage(reply):
            head = self._head(reply, "chat.completion.chunk")
            events.append(event({**head, "choices": [], "usage": self._usage(reply)}))
        return events

    def terminal(self, reply: Reply) -> bytes:
        """Return `[DONE]`."""
        return b"data: [DONE]\n\n"

    def _chunk(self, reply: Reply, delta: JSONObject, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head(reply, "chat.completion.chunk"), "choices": [choice]}
        return event({**chunk, "usage": None} if _includes_usage(reply) else chunk)

    def _head(self, reply: Reply, kind: str) -> JSONObject:
        return {
            "id": f"chatcmpl-fake{reply.number:06}",
            "object": kind,
            "created": reply.created,
            "model": reply.model,
            "service_tier": "default",
            "system_fingerprint": "fp_fake",
        }

    def _finish_reason(self, reply: Reply) -> str:
        return reply.finish_reason or ("length" if reply.truncated else "stop")

    def _usage(self, reply: Reply) -> JSONObject:
        return {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": len(reply.tokens),
            "total_tokens": reply.prompt_tokens + len(reply.tokens),
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }


def openai_models(names: Sequence[str]) -> JSONObject:
    """Return the body of `GET /v1/models`."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "fake-provider"} for name in names]
    return {"object": "list", "data": data}


def duration(seconds: float) -> str:
    """Write a duration as OpenAI's headers do, in ms rounded up: `17ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    millis = math.ceil(seconds * 1000 - 1e-6)
    if millis < 1000:
        return f"{millis}ms" if millis else "0s"
    minutes, millis = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{head}{millis / 1000:g}s"


def _includes_usage(reply: Reply) -> bool:
    options = reply.request.get("stream_options")
    return isinstance(options, Mapping) and options.get("include_usage") is True
