"""The Amazon Bedrock runtime: InvokeModel and Converse, which name the model in the path."""

from __future__ import annotations

import json
from typing import ClassVar
from urllib.parse import unquote

from resilient_llm.location import locate
from resilient_llm.message import JSONObject, Request
from resilient_llm.profile import Profile
from resilient_llm.providers.answer import Answer, EventKind, count, objects
from resilient_llm.providers.base import BaseDialect
from resilient_llm.providers.unknown import UNKNOWN

__all__ = ["BEDROCK", "BedrockDialect"]

_ENDINGS = ("/invoke", "/invoke-with-response-stream", "/converse", "/converse-stream", "/count-tokens")
_STREAMS = ("/invoke-with-response-stream", "/converse-stream")

_CODES = {
    400: "ValidationException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    408: "ModelTimeoutException",
    429: "ThrottlingException",
    503: "ServiceUnavailableException",
}


class BedrockDialect(BaseDialect):
    """Speak the Bedrock runtime's own API; its OpenAI and Anthropic endpoints are those dialects.

    Its streams are binary and not read. What InvokeModel gives back is in the shape of the model's maker.
    """

    name: ClassVar[str] = "bedrock"
    provider: ClassVar[str] = "aws.bedrock"
    marks_end: ClassVar[bool] = False

    def matches(self, request: Request) -> bool:
        """Tell by the route or the host."""
        location = locate(request.url)
        return location.provider == "aws.bedrock" or _model(location.path) is not None

    def profile(self, request: Request) -> Profile:
        """Say what a request asks for; an asynchronous invocation is no known one, since it creates a job."""
        path = locate(request.url).path
        model = _model(path)
        if model is None or request.method != "POST":
            return super().profile(request)
        operation = "chat"
        if path.endswith("/count-tokens"):
            operation = "count_tokens"
        elif "embed" in model:  # InvokeModel does not say; the models' names do
            operation = "embeddings"
        return Profile(
            provider=self.provider,
            operation=operation,
            model=model,
            stream=path.endswith(_STREAMS),
        )

    def read_event(self, event: str, body: JSONObject, answer: Answer) -> EventKind:
        """Read an event by its shape; there are none of Bedrock's own."""
        return UNKNOWN.read_event(event, body, answer)

    def read_body(self, body: JSONObject, answer: Answer) -> None:
        """Read a reply of Converse, or any other by its shape."""
        output = body.get("output")
        message = output.get("message") if isinstance(output, dict) else None
        if not isinstance(message, dict):
            UNKNOWN.read_body(body, answer)
            return
        for block in objects(message.get("content")):
            said = block.get("text")
            if isinstance(said, str):
                answer.say(said)
            else:
                answer.do()
        answer.finish(body.get("stopReason"))
        usage = body.get("usage")
        cached = count(usage, "cacheReadInputTokens")
        read = count(usage, "inputTokens")
        if read is not None:
            read += (cached or 0) + (count(usage, "cacheWriteInputTokens") or 0)
        answer.count_tokens(input=read, output=count(usage, "outputTokens"), cached=cached)

    def error_body(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """Write `{"message", "__type"}`."""
        kind = code or _CODES.get(status) or ("InternalServerException" if status >= 500 else _CODES[400])
        return json.dumps({"message": message, "__type": kind}).encode()

    def error_event(
        self,
        request: Request,
        status: int,
        message: str,
        *,
        code: str | None = None,
        sequence: int | None = None,
    ) -> bytes:
        """Write the error as for a stream of unknown kind, since a stream of events here is not Bedrock's own."""
        return UNKNOWN.error_event(request, status, message, code=code, sequence=sequence)


def _model(path: str) -> str | None:
    """Give the model of /model/{model}/invoke, which may be an ARN with its slashes escaped."""
    if not path.endswith(_ENDINGS):
        return None
    return unquote(path.rpartition("/model/")[2].rpartition("/")[0]) or None


BEDROCK = BedrockDialect()
