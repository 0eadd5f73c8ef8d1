"""How Anthropic's API puts it: messages, errors and rate-limit headers.

Shapes as the anthropic SDK parses them; only what a text-only model sends.
"""

# ruff: noqa: ARG002 - each method takes what some dialect needs

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from ._dialect import SERVER_ERROR, TOO_MANY_REQUESTS, JSONObject, Reply, event, positive_int, whole_seconds
from ._fault import Fault
from ._rate_limits import Level, Refusal

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_MESSAGES = {
    "authentication_error": "invalid x-api-key",
    "rate_limit_error": "This request would exceed your organization's rate limit.",
    "overloaded_error": "Overloaded",
    "api_error": "Internal server error",
}


class AnthropicMessages:
    """`POST /v1/messages`."""

    name = "anthropic.messages"
    streams = True
    request_id_header = "request-id"

    def prompt(self, request: JSONObject) -> object:
        """Return the system prompt and the messages."""
        return [request.get("system"), request.get("messages")]

    def max_tokens(self, request: JSONObject) -> int | None:
        """Return `max_tokens`."""
        return positive_int(request, "max_tokens")

    def message(self, reply: Reply) -> JSONObject:
        """Return a finished `message`."""
        content = [{"type": "text", "text": reply.text, "citations": None}]
        usage = {**self._usage(reply), "output_tokens": len(reply.tokens)}
        return {
            **self._head(reply),
            "content": content,
            "stop_reason": self._stop_reason(reply),
            "usage": usage,
        }

    def opening(self, reply: Reply) -> list[bytes]:
        """Return the events that open the message and its text block, and the ping that follows them."""
        message = {**self._head(reply), "content": [], "stop_reason": None}
        message["usage"] = {**self._usage(reply), "output_tokens": 1}
        block = {"type": "text", "text": ""}
        return [
            self._event("message_start", message=message),
            self._event("content_block_start", index=0, content_block=block),
            self.ping(),
        ]

    def token(self, reply: Reply, index: int) -> bytes:
        """Return a text delta."""
        delta = {"type": "text_delta", "text": reply.tokens[index]}
        return self._event("content_block_delta", index=0, delta=delta)

    def closing(self, reply: Reply) -> list[bytes]:
        """Return the end of the block, then the stop reason with usage."""
        delta = {"stop_reason": self._stop_reason(reply), "stop_sequence": None}
        return [
            self._event("content_block_stop", index=0),
            self._event("message_delta", delta=delta, usage={"output_tokens": len(reply.tokens)}),
        ]

    def terminal(self, reply: Reply) -> bytes:
        """Return `message_stop`."""
        return self._event("message_stop")

    def ping(self) -> bytes:
        """Return a `ping` event."""
        return self._event("ping")

    def error(self, fault: Fault, request_id: str) -> JSONObject:
        """Return `{"type": "error", "error": ...}`."""
        status = fault.status or SERVER_ERROR
        default = "api_error" if status >= SERVER_ERROR else "invalid_request_error"
        kind = fault.type or _TYPES.get(status, default)
        message = fault.message or _MESSAGES.get(kind, kind.replace("_", " "))
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}

    def error_event(self, error: JSONObject, tokens_sent: int) -> bytes:
        """Return the error body as an `error` event."""
        return event(error, "error")

    def refusal(self, model: str, refusal: Refusal) -> Fault:
        """Return a 429 that says which limit, and when to come back."""
        limit = f"{refusal.level.limit:,.0f} {refusal.level.dimension} per minute"
        message = (
            f"This request would exceed the rate limit for your organization of {limit} (model: {model})."
        )
        never = math.isinf(refusal.wait)
        headers = {} if never else {"retry-after": str(whole_seconds(refusal.wait))}
        return Fault(status=TOO_MANY_REQUESTS, message=message, headers=headers)

    def rate_limit_headers(self, levels: Sequence[Level], wall_clock: float) -> dict[str, str]:
        """Return `anthropic-ratelimit-*`, with resets as the instant at which the bucket is full."""
        headers = {}
        for level in levels:
            prefix = f"anthropic-ratelimit-{level.dimension}"
            instant = datetime.fromtimestamp(math.ceil(wall_clock + level.reset), UTC)
            headers[f"{prefix}-limit"] = f"{level.limit:.0f}"
            headers[f"{prefix}-remaining"] = str(math.floor(level.remaining))
            headers[f"{prefix}-reset"] = instant.strftime("%Y-%m-%dT%H:%M:%SZ")
        return headers

    def _event(self, kind: str, **fields: object) -> bytes:
        return event({"type": kind, **fields}, kind)

    def _head(self, reply: Reply) -> dict[str, object]:
        return {
            "id": f"msg_fake{reply.number:06}",
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "stop_sequence": None,
        }

    def _usage(self, reply: Reply) -> dict[str, object]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": reply.prompt_tokens, **cached, "service_tier": "standard"}

    def _stop_reason(self, reply: Reply) -> str:
        return reply.finish_reason or ("max_tokens" if reply.truncated else "end_turn")


def anthropic_models(names: Sequence[str]) -> JSONObject:
    """Return the body of `GET /v1/models`."""
    data = [
        {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        for name in names
    ]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}
