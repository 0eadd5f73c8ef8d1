"""The dialect of requests that nobody knows: safe assumptions only.

An answer is read by its shape, since that may well be one of those known.
"""

from __future__ import annotations

from typing import ClassVar

from resilient_llm.message import JSONObject, Request
from resilient_llm.providers import openai, openai_answers
from resilient_llm.providers.answer import Answer, EventKind
from resilient_llm.providers.anthropic import ANTHROPIC
from resilient_llm.providers.base import BaseDialect
from resilient_llm.providers.gemini import GEMINI

__all__ = ["UNKNOWN", "UnknownDialect"]


class UnknownDialect(BaseDialect):
    """Assume nothing beyond HTTP: a POST is not safe to repeat, an error means what its status says.

    A stream is whole when it ends properly; every event that holds anything may be the answer.
    """

    name: ClassVar[str] = "unknown"
    provider: ClassVar[str] = "unknown"
    marks_end: ClassVar[bool] = False

    def matches(self, request: Request) -> bool:  # noqa: ARG002 - a request of any kind
        """Match every request."""
        return True

    def read_event(self, event: str, body: JSONObject, answer: Answer) -> EventKind:
        """Read an event of a known shape; of any other it can only be said whether there is anything in it."""
        if event == "ping" or body.get("type") == "ping":
            return EventKind.META
        if ANTHROPIC.recognises(body):
            return ANTHROPIC.read_event(event, body, answer)
        if GEMINI.recognises(body):
            return GEMINI.read_event(event, body, answer)
        if "choices" in body or str(body.get("type")).startswith("response."):
            return openai_answers.read_event(body, answer)
        return EventKind.CONTENT if body else EventKind.META

    def read_body(self, body: JSONObject, answer: Answer) -> None:
        """Read a reply of a known shape."""
        if ANTHROPIC.recognises(body):
            ANTHROPIC.read_body(body, answer)
        elif GEMINI.recognises(body):
            GEMINI.read_body(body, answer)
        else:
            openai_answers.read_body(body, answer)

    def error_body(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """Write an error in OpenAI's shape, which most clients understand."""
        return openai.error_body(status, message, code=code)


UNKNOWN = UnknownDialect()
