"""Streams of nobody knows whom: any proper end is a success, errors are errors, known shapes are read."""

from __future__ import annotations

from typing import Any

from resilient_llm.outcome import Scope, Verdict
from resilient_llm.providers import BEDROCK, UNKNOWN
from tests.providers.streams import anthropic, gemini, openai_chat, openai_responses
from tests.providers.streams.example import EMPTY, TRUNCATED, Example, sse, tokens


def example(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    return Example(name=name, dialect=UNKNOWN, stream=stream, kinds=kinds, **expected)


EXAMPLES = [
    example("objects", sse({"token": "a"}) + sse({}) + sse({"token": "b"}), "cmc"),
    example("words", sse("hello") + sse("there"), "cc"),
    example("a word without its blank line", b"data: hello", ""),
    example("comments only, which is all that some streams have", b": ping\n\n", "", keepalives=1),
    example("pings", b"event: ping\ndata: x\n\n" + sse({"type": "ping"}), "mm", keepalives=1),
    example("a terminal marker", sse("hello") + sse("[DONE]") + sse("more"), "cem"),
    example("a malformed object", sse("{") + sse("hello"), "bc", malformed=1),
    example("no bytes at all", b"", "", outcome=EMPTY),
    example("cut in the middle of an object", sse({"token": "a"}) + b'data: {"tok', "c", outcome=TRUNCATED),
    example(
        "an error",
        sse({"token": "a"}) + sse({"error": {"message": "m", "code": 503}}),
        "c!",
        outcome=(Verdict.FAILURE, Scope.TARGET, "503"),
        status=503,
    ),
    example(
        "an event called so",
        sse("it broke", "error"),
        "!",
        outcome=(Verdict.FAILURE, Scope.TARGET, "500"),
        status=500,
    ),
    example(
        "a bare error",
        b'{"error": {"code": 503, "status": "UNAVAILABLE"}}',
        "",
        outcome=(Verdict.FAILURE, Scope.TARGET, "UNAVAILABLE"),
        status=503,
    ),
    example(
        "a chat completion that breaks off: who knows",
        openai_chat.ROLE + openai_chat.says("Hello"),
        "mc",
        model=openai_chat.MODEL,
        id=openai_chat.ID,
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    *(
        Example(**{**vars(known), "dialect": dialect})
        for dialect in (UNKNOWN, BEDROCK)
        for known in (
            openai_chat.WHOLE[0],
            openai_responses.WHOLE[0],
            anthropic.WHOLE[0],
            gemini.WHOLE[0],
            gemini.INTERACTIONS[0],
            *openai_chat.ERRORS[:8],
            *openai_responses.ERRORS,
            *anthropic.ERRORS,
            *gemini.ERRORS,
        )
    ),
]
