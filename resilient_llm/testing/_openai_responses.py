"""How OpenAI's Responses API puts it, in simple form: one message with one text part."""

from __future__ import annotations

from collections.abc import Mapping

from ._dialect import JSONObject, Reply, event, positive_int
from ._openai import OpenAI

_OPENING_EVENTS = 4


class OpenAIResponses(OpenAI):
    """`POST /v1/responses`."""

    name = "openai.responses"
    streams = True

    def prompt(self, request: JSONObject) -> object:
        """Return the instructions and the input."""
        return [request.get("instructions"), request.get("input")]

    def max_tokens(self, request: JSONObject) -> int | None:
        """Return `max_output_tokens`."""
        return positive_int(request, "max_output_tokens")

    def message(self, reply: Reply) -> JSONObject:
        """Return a finished `response`."""
        return self._response(reply, self._status(reply))

    def opening(self, reply: Reply) -> list[bytes]:
        """Return the events that open the response, its message and its part."""
        running = self._response(reply, "in_progress")
        item = {**self._item(reply, "in_progress"), "content": []}
        return [
            self._event("response.created", 0, response=running),
            self._event("response.in_progress", 1, response=running),
            self._event("response.output_item.added", 2, output_index=0, item=item),
            self._event("response.content_part.added", 3, **self._position(reply), part=self._part("")),
        ]

    def token(self, reply: Reply, index: int) -> bytes:
        """Return a text delta."""
        number = _OPENING_EVENTS + index
        delta = {**self._position(reply), "delta": reply.tokens[index], "logprobs": []}
        return self._event("response.output_text.delta", number, **delta)

    def closing(self, reply: Reply) -> list[bytes]:
        """Return the events that close the part and the message."""
        number = _OPENING_EVENTS + len(reply.tokens)
        position, text = self._position(reply), reply.text
        item = self._item(reply, self._status(reply))
        return [
            self._event("response.output_text.done", number, **position, text=text, logprobs=[]),
            self._event("response.content_part.done", number + 1, **position, part=self._part(text)),
            self._event("response.output_item.done", number + 2, output_index=0, item=item),
        ]

    def terminal(self, reply: Reply) -> bytes:
        """Return `response.completed`, or `response.incomplete` for a reply that was cut short."""
        number, status = _OPENING_EVENTS + len(reply.tokens) + 3, self._status(reply)
        return self._event(f"response.{status}", number, response=self._response(reply, status))

    def error_event(self, error: JSONObject, tokens_sent: int) -> bytes:
        """Return an `error` event, whose fields stand at the top level."""
        detail = error.get("error")
        fields = detail if isinstance(detail, Mapping) else error
        data = {
            "code": fields.get("code") or fields.get("type"),
            "message": fields.get("message"),
            "param": None,
        }
        return self._event("error", _OPENING_EVENTS + tokens_sent, **data)

    def _event(self, kind: str, number: int, **fields: object) -> bytes:
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _position(self, reply: Reply) -> dict[str, object]:
        return {"item_id": self._item_id(reply), "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> JSONObject:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, reply: Reply, status: str) -> JSONObject:
        content = [self._part(reply.text)]
        identity = {"id": self._item_id(reply), "type": "message", "role": "assistant"}
        return {**identity, "status": status, "content": content}

    def _item_id(self, reply: Reply) -> str:
        return f"msg_fake{reply.number:06}"

    def _status(self, reply: Reply) -> str:
        return "incomplete" if reply.truncated or reply.finish_reason else "completed"

    def _response(self, reply: Reply, status: str) -> JSONObject:
        finished = status != "in_progress"
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(reply.tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + len(reply.tokens),
        }
        reason = reply.finish_reason or "max_output_tokens"
        return {
            "id": f"resp_fake{reply.number:06}",
            "object": "response",
            "created_at": reply.created,
            "model": reply.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": reply.request.get("instructions"),
            "metadata": {},
            "output": [self._item(reply, status)] if finished else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage if finished else None,
        }
