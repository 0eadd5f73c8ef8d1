"""Streams of generateContent, which has no terminal marker, and of interactions, which have one."""

from __future__ import annotations

from typing import Any

from resilient_llm.outcome import Scope, Verdict
from resilient_llm.providers import GEMINI
from tests.providers.streams.example import EMPTY, TRUNCATED, Example, sse, tokens

ID = "NdmKaIOvD5-OmNAP3raHoQE"
MODEL = "gemini-2.5-flash"

BARE_ERROR = b"""{
  "error": {
    "code": 503,
    "message": "This model is currently experiencing high demand.",
    "status": "UNAVAILABLE"
  }
}
"""


def chunk(
    *parts: dict[str, Any], finish: str | None = None, written: int | None = None, **usage: Any
) -> bytes:
    candidate: dict[str, Any] = {"content": {"parts": list(parts), "role": "model"}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    counts = {
        "promptTokenCount": 8,
        **({} if written is None else {"candidatesTokenCount": written}),
        **usage,
    }
    return sse(
        {
            "candidates": [candidate],
            "usageMetadata": {**counts, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 8}]},
            "modelVersion": MODEL,
            "responseId": ID,
        }
    )


def says(text: str, **fields: Any) -> bytes:
    return chunk({"text": text}, **fields)


def ok(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    known: dict[str, Any] = {"model": MODEL, "id": ID, "finish_reasons": ("STOP",)}
    return Example(name=name, dialect=GEMINI, stream=stream, kinds=kinds, **{**known, **expected})


def bad(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    known: dict[str, Any] = {"model": MODEL, "id": ID, "outcome": TRUNCATED}
    return Example(name=name, dialect=GEMINI, stream=stream, kinds=kinds, **{**known, **expected})


def nameless(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    return Example(name=name, dialect=GEMINI, stream=stream, kinds=kinds, **expected)


WHOLE = [
    ok(
        "text",
        says("AI learns", written=2)
        + says(" patterns from", written=4)
        + says(" data", written=5)
        + says(".", finish="STOP", written=6),
        "cccc",
        usage=tokens(8, 6),
        text="AI learns patterns from data.",
    ),
    ok(
        "thinking first",
        chunk({"text": "Let me see", "thought": True}, thoughtsTokenCount=20)
        + says("Four", written=1, thoughtsTokenCount=31)
        + chunk({"text": "", "thoughtSignature": "CikB0"}, finish="STOP", written=1, thoughtsTokenCount=31),
        "ccm",
        usage=tokens(8, 32, reasoning=31),
        text="Four",
    ),
    ok(
        "a call of a function",
        chunk({"functionCall": {"name": "f", "args": {"text": "four"}}}, finish="STOP", written=9),
        "c",
        usage=tokens(8, 9),
        text=None,
    ),
    ok(
        "a picture, and code that was run",
        chunk({"inlineData": {"mimeType": "image/png", "data": "AAAA"}})
        + chunk({"executableCode": {"language": "PYTHON", "code": "1"}}, finish="STOP", written=1290),
        "cc",
        usage=tokens(8, 1290),
        text=None,
    ),
    ok(
        "a cached prompt and a tool's results",
        says("x", finish="STOP", written=1, cachedContentTokenCount=6, toolUsePromptTokenCount=100),
        "c",
        usage=tokens(108, 1, cached=6),
        text="x",
    ),
    ok(
        "cut off by the filter of what it says",
        says("I", written=1) + chunk(finish="SAFETY", written=1),
        "cm",
        finish_reasons=("SAFETY",),
        usage=tokens(8, 1),
        text="I",
    ),
    ok(
        "counts in the last part only",
        says("Hello") + says(" you") + says("!", finish="STOP", written=3),
        "ccc",
        usage=tokens(8, 3),
        text="Hello you!",
    ),
    ok(
        "a last event without its blank line",
        says("Hello", written=1) + says("!", finish="STOP", written=2).rstrip(),
        "c",
        usage=tokens(8, 2),
        text="Hello!",
    ),
]

CUT = [
    bad(
        "after some text",
        says("Hello", written=1) + says(" you", written=2),
        "cc",
        usage=tokens(8, 3, estimated=True),
        text="Hello you",
    ),
    bad("without a word", chunk(), "m", usage=tokens(8, None, estimated=True)),
    nameless("no bytes at all", b"", "", outcome=EMPTY),
]

BLOCKED = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 8}}

ERRORS = [
    nameless(
        "as an event",
        sse({"error": {"code": 429, "message": "Resource exhausted", "status": "RESOURCE_EXHAUSTED"}}),
        "!",
        outcome=(Verdict.THROTTLED, Scope.TARGET, "RESOURCE_EXHAUSTED"),
        status=429,
    ),
    bad(
        "bare, after some text",
        says("Hello", written=1) + BARE_ERROR,
        "c",
        outcome=(Verdict.FAILURE, Scope.TARGET, "UNAVAILABLE"),
        status=503,
        usage=tokens(8, 2, estimated=True),
        text="Hello",
    ),
    nameless(
        "bare, in a list, after a comment",
        b": hello\n\n[" + BARE_ERROR + b"]",
        "",
        outcome=(Verdict.FAILURE, Scope.TARGET, "UNAVAILABLE"),
        status=503,
        keepalives=1,
    ),
    nameless(
        "a prompt that was blocked",
        sse(BLOCKED),
        "!",
        outcome=(Verdict.FATAL, Scope.REQUEST, "content_filter"),
        status=400,
        retryable=False,
        usage=tokens(8, None, estimated=True),
    ),
    nameless(
        "a prompt that was blocked, in plain JSON",
        b'{"promptFeedback": {"blockReason": "SAFETY"}}',
        "",
        outcome=(Verdict.FATAL, Scope.REQUEST, "content_filter"),
        status=400,
        retryable=False,
    ),
]


def step(kind: str, **fields: Any) -> bytes:
    return sse({"event_type": kind, **fields}, kind)


INTERACTION = {"id": "int_1", "object": "interaction", "model": MODEL, "status": "in_progress"}
DONE = sse("[DONE]", "done")

INTERACTIONS = [
    nameless(
        "an interaction",
        step("interaction.created", interaction=INTERACTION)
        + step("step.start", index=0, step={"type": "model_output"})
        + step("step.delta", index=0, delta={"type": "thought_signature", "signature": "x"})
        + step("step.delta", index=0, delta={"type": "text", "text": "Hello"})
        + step("step.delta", index=0, delta={"type": "text", "text": " you"})
        + step("step.delta", index=1, delta={"type": "image", "data": "AAAA"})
        + step("step.stop", index=0)
        + step("interaction.status_update", interaction_id="int_1", status="completed")
        + step(
            "interaction.completed",
            interaction={
                **INTERACTION,
                "status": "completed",
                "usage": {
                    "total_input_tokens": 7,
                    "total_cached_tokens": 2,
                    "total_output_tokens": 5,
                    "total_thought_tokens": 20,
                    "total_tokens": 32,
                },
            },
        )
        + DONE,
        "mmmcccmmem",
        model=MODEL,
        id="int_1",
        finish_reasons=("completed",),
        usage=tokens(7, 25, cached=2, reasoning=20),
        text=None,
    ),
    nameless(
        "an interaction that breaks off",
        step("interaction.created", interaction=INTERACTION)
        + step("step.delta", index=0, delta={"type": "text", "text": "Hello"}),
        "mc",
        model=MODEL,
        id="int_1",
        outcome=TRUNCATED,
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    nameless(
        "an interaction that failed",
        step("interaction.created", interaction=INTERACTION)
        + step("step.delta", index=0, delta={"type": "text", "text": "Hello"})
        + step(
            "interaction.completed",
            interaction={
                **INTERACTION,
                "status": "failed",
                "errors": [{"code": "service_unavailable", "message": "m"}],
            },
        )
        + DONE,
        "mc!e",
        model=MODEL,
        id="int_1",
        outcome=(Verdict.FAILURE, Scope.TARGET, "service_unavailable"),
        status=503,
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    nameless(
        "an error in an interaction",
        step("error", error={"code": "resource_exhausted", "message": "m"}),
        "!",
        outcome=(Verdict.THROTTLED, Scope.TARGET, "resource_exhausted"),
        status=429,
    ),
]

EXAMPLES = [*WHOLE, *CUT, *ERRORS, *INTERACTIONS]
