"""The OpenAI API, and everything compatible with it: Azure, Groq, Mistral, OpenRouter, vLLM, Ollama ...

Which requests are safe to repeat is told from the route, since a POST says nothing about it. Answers are
read in `openai_answers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, NamedTuple

from resilient_llm._kept import LONGEST_MODEL, LONGEST_URL
from resilient_llm.core import sse
from resilient_llm.location import locate
from resilient_llm.message import JSONObject, Request
from resilient_llm.profile import Profile
from resilient_llm.providers import openai_answers
from resilient_llm.providers.answer import Answer, EventKind
from resilient_llm.providers.base import BaseDialect, asked, kept_profile, stored, text

__all__ = ["OPENAI", "OpenAIDialect", "error_body"]


class _Route(NamedTuple):
    operation: str
    repeat_safe: bool = True
    numbered: bool = False
    """Whether the events of its streams are named and numbered."""


_CHAT = _Route("chat")
# Left out of the safe ones is what creates something, or costs too much to have twice by accident.
_ROUTES: Mapping[str, _Route] = {
    "/chat/completions": _CHAT,
    "/completions": _Route("text_completion"),
    "/responses": _Route("chat", numbered=True),
    "/embeddings": _Route("embeddings"),
    "/moderations": _Route("moderation"),
    "/rerank": _Route("rerank"),
    "/responses/input_tokens": _Route("count_tokens"),
    "/images/generations": _Route("image_generation", repeat_safe=False),
    "/images/edits": _Route("image_generation", repeat_safe=False),
    "/audio/speech": _Route("speech", repeat_safe=False),
    "/audio/transcriptions": _Route("transcription", repeat_safe=False),
    "/audio/translations": _Route("translation", repeat_safe=False),
}
_ENDINGS = tuple(_ROUTES)
_PROVIDERS = frozenset({"openai", "azure.ai.openai"})
"""Who speaks nothing else, on any route."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class OpenAIDialect(BaseDialect):
    """Speak the OpenAI API.

    A stream of completions is whole after `[DONE]`, and also, since compatible servers leave that out, when it
    ends properly and every choice that began has a `finish_reason`. A stream of a response is whole after
    `response.completed` or `response.incomplete` only: nothing else says that no further item comes.
    """

    name: ClassVar[str] = "openai"
    provider: ClassVar[str] = "openai"

    def matches(self, request: Request) -> bool:
        """Tell by the route, or by a host that speaks nothing else."""
        location = locate(request.url)
        return location.path.endswith(_ENDINGS) or location.provider in _PROVIDERS

    def profile(self, request: Request) -> Profile:
        """Say what a request asks for.

        A response is safe to repeat unless it is to be kept (`store`, `background`) or extends a
        conversation. OpenAI stores it by default as well, but a caller who did not ask for that does not
        come back for it.
        """
        location = locate(request.url)
        route = _route(location.path) if request.method == "POST" else None
        if route is None:
            return super().profile(request)
        body = request.json
        provider = location.provider or self.provider
        model = text(body.get("model")) or _deployment(location.path)
        stream = asked(body.get("stream")) and route.operation != "embeddings"
        repeat_safe = route.repeat_safe and not stored(body) and body.get("conversation") is None
        resumable = route is _CHAT and body.get("messages") is not None and body.get("n") in (None, 1)
        # The SDK renews a caller's key for each step of its tool runners, which suggests that the API
        # goes by it. A server at an unknown host does too or passes over it; known others document none.
        key = b"idempotency-key" if provider == "openai" else None
        make = kept_profile if model is None or len(model) <= LONGEST_MODEL else kept_profile.__wrapped__
        return make(provider, route.operation, model, stream, repeat_safe, resumable, key)

    def read_event(self, event: str, body: JSONObject, answer: Answer) -> EventKind:  # noqa: ARG002 - never needed
        """Read an event of a completion, a response, or the endpoints for sound and pictures."""
        return openai_answers.read_event(body, answer)

    def read_body(self, body: JSONObject, answer: Answer) -> None:
        """Read a completion, a response, embeddings."""
        openai_answers.read_body(body, answer)

    def error_body(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """Write `{"error": {"message", "type", "param", "code"}}`."""
        return error_body(status, message, code=code)

    def error_event(
        self,
        request: Request,
        status: int,
        message: str,
        *,
        code: str | None = None,
        sequence: int | None = None,
    ) -> bytes:
        """Write `data: {"error": ...}`; for a response an `error` event.

        That one has its fields at the top level by the API's reference and nested by what the API sends, and
        the SDK raises an error for the latter only. So it has them in both places.
        """
        body = error_body(status, message, code=code)
        route = _route(locate(request.url).path)
        if route is None or not route.numbered:
            return sse.encode(body)
        error: JSONObject = json.loads(body)["error"]
        event = {
            "type": "error",
            "code": error["code"] or error["type"],
            "message": message,
            "param": None,
            "sequence_number": 0 if sequence is None else sequence + 1,
            "error": error,
        }
        return sse.encode(json.dumps(event), event="error")


def error_body(status: int, message: str, *, code: str | None = None) -> bytes:
    """Write an error in OpenAI's shape, which most clients understand."""
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    error: JSONObject = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def _route(path: str) -> _Route | None:
    """Find the route by the last two segments of a path, or by the last."""
    return _kept_route(path) if len(path) <= LONGEST_URL else _find_route(path)


def _find_route(path: str) -> _Route | None:
    head, _, last = path.rpartition("/")
    return _ROUTES.get(f"/{head.rpartition('/')[2]}/{last}") or _ROUTES.get(f"/{last}")


_kept_route = lru_cache(maxsize=1024)(_find_route)


def _deployment(path: str) -> str | None:
    """Give the deployment that an Azure path names: /openai/deployments/{deployment}/chat/completions."""
    return path.partition("/deployments/")[2].partition("/")[0] or None


OPENAI = OpenAIDialect()
