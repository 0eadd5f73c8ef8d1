"""Streams of the Responses API, and of OpenAI's endpoints for sound and pictures."""

from __future__ import annotations

from typing import Any

from resilient_llm.outcome import Scope, Verdict
from resilient_llm.providers import OPENAI
from tests.providers.streams.example import EMPTY, TRUNCATED, Example, sse, tokens

ID = "resp_67c9fdcecf488190bdd9a0409de3a1ec07b8b0ad4e5eb654"
MODEL = "gpt-4.1-2025-04-14"
USAGE = {
    "input_tokens": 37,
    "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
    "output_tokens": 11,
    "output_tokens_details": {"reasoning_tokens": 6},
    "total_tokens": 48,
}
ITEM = {"item_id": "msg_67c9fdcf37fc8190ba82116e33fb28c5", "output_index": 0, "content_index": 0}


class Numbered:
    """Write named events and number them."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        event = sse({"type": kind, "sequence_number": self.number, **fields}, kind)
        self.number += 1
        return event


def response(status: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": ID,
        "object": "response",
        "created_at": 1741290958,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": MODEL,
        "output": [],
        "usage": None,
        **fields,
    }


def opening(event: Numbered) -> bytes:
    running = response("in_progress")
    return event("response.created", response=running) + event("response.in_progress", response=running)


def message(event: Numbered, *pieces: str) -> bytes:
    """Write a message item from its beginning to its end: 4 + one event for each piece and 1."""
    text = "".join(pieces)
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": ITEM["item_id"], "type": "message", "role": "assistant", "content": [part]}
    return (
        event("response.output_item.added", output_index=0, item={**item, "content": []})
        + event("response.content_part.added", **ITEM, part={**part, "text": ""})
        + b"".join(
            event(
                "response.output_text.delta", **ITEM, delta=piece, logprobs=[], obfuscation="x" * len(piece)
            )
            for piece in pieces
        )
        + event("response.output_text.done", **ITEM, text=text)
        + event("response.content_part.done", **ITEM, part=part)
        + event("response.output_item.done", output_index=0, item=item)
    )


def stream(*, pieces: tuple[str, ...] = (), before: Any = None, last: Any = None) -> bytes:
    """Write a stream of a response: its opening, items, a message, and its end."""
    event = Numbered()
    return (
        opening(event)
        + (before(event) if before else b"")
        + (message(event, *pieces) if pieces else b"")
        + (last(event) if last else b"")
    )


def completed(event: Numbered, **fields: Any) -> bytes:
    return event("response.completed", response=response("completed", usage=USAGE, **fields))


def thinking(event: Numbered) -> bytes:
    item = {"id": "rs_1", "type": "reasoning", "summary": []}
    place = {"item_id": "rs_1", "output_index": 0, "summary_index": 0}
    return (
        event("response.output_item.added", output_index=0, item=item)
        + event("response.reasoning_summary_part.added", **place, part={"type": "summary_text", "text": ""})
        + event("response.reasoning_summary_text.delta", **place, delta="Hm")
        + event("response.reasoning_summary_text.delta", **place, delta="m.")
        + event("response.reasoning_summary_text.done", **place, text="Hmm.")
        + event("response.output_item.done", output_index=0, item=item)
    )


def calling(event: Numbered) -> bytes:
    item = {"id": "fc_1", "type": "function_call", "name": "f", "call_id": "call_1", "arguments": ""}
    place = {"item_id": "fc_1", "output_index": 0}
    return (
        event("response.output_item.added", output_index=0, item=item)
        + event("response.function_call_arguments.delta", **place, delta='{"a"')
        + event("response.function_call_arguments.delta", **place, delta=":1}")
        + event("response.function_call_arguments.done", **place, arguments='{"a":1}')
        + event("response.output_item.done", output_index=0, item={**item, "arguments": '{"a":1}'})
    )


def searching(event: Numbered) -> bytes:
    item = {"id": "ws_1", "type": "web_search_call", "status": "in_progress"}
    place = {"item_id": "ws_1", "output_index": 0}
    return (
        event("response.output_item.added", output_index=0, item=item)
        + event("response.web_search_call.in_progress", **place)
        + event("response.web_search_call.searching", **place)
        + event("response.web_search_call.completed", **place)
        + event("response.output_item.done", output_index=0, item={**item, "status": "completed"})
    )


def drawing(event: Numbered) -> bytes:
    item = {"id": "ig_1", "type": "image_generation_call", "status": "in_progress", "result": None}
    place = {"item_id": "ig_1", "output_index": 0}
    return (
        event("response.output_item.added", output_index=0, item=item)
        + event("response.image_generation_call.generating", **place)
        + event(
            "response.image_generation_call.partial_image",
            **place,
            partial_image_index=0,
            partial_image_b64="A",
        )
        + event("response.output_item.done", output_index=0, item={**item, "result": "AAAA"})
    )


def ok(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    known: dict[str, Any] = {
        "model": MODEL,
        "id": ID,
        "finish_reasons": ("completed",),
        "usage": tokens(37, 11, cached=16, reasoning=6),
        "text": None,
    }
    return Example(name=name, dialect=OPENAI, stream=stream, kinds=kinds, **{**known, **expected})


def bad(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    known: dict[str, Any] = {"model": MODEL, "id": ID, "outcome": TRUNCATED}
    return Example(name=name, dialect=OPENAI, stream=stream, kinds=kinds, **{**known, **expected})


HELLO = ("Hel", "lo", " there", "!")

WHOLE = [
    ok("a message", stream(pieces=HELLO, last=completed), "mmmmccccmmme", text="Hello there!"),
    ok(
        "incomplete",
        stream(
            pieces=HELLO,
            last=lambda event: event(
                "response.incomplete",
                response=response(
                    "incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=USAGE
                ),
            ),
        ),
        "mmmmccccmmme",
        finish_reasons=("max_output_tokens",),
        text="Hello there!",
    ),
    ok(
        "thinking first",
        stream(pieces=HELLO, before=thinking, last=completed),
        "mmmmccmmmmccccmmme",
        text="Hello there!",
    ),
    ok("a call of a function", stream(before=calling, last=completed), "mmcccmme"),
    ok(
        "a search first",
        stream(pieces=HELLO, before=searching, last=completed),
        "mmcmmmcmmccccmmme",
    ),
    ok("a picture", stream(before=drawing, last=completed), "mmcmcce"),
    ok("nothing to say", stream(last=completed), "mme", text=""),
    ok(
        "a refusal",
        stream(
            before=lambda event: event("response.refusal.delta", **ITEM, delta="I can't."),
            last=completed,
        ),
        "mmce",
    ),
    ok(
        "a terminal marker of another API after its own",
        stream(pieces=HELLO, last=completed) + sse("[DONE]"),
        "mmmmccccmmmem",
        text="Hello there!",
    ),
    ok(
        "queued, with keep-alives",
        sse(
            {"type": "response.queued", "sequence_number": 0, "response": response("queued")},
            "response.queued",
        )
        + b": ping\n\n"
        + sse({"type": "keepalive", "sequence_number": 1}, "keepalive")
        + stream(pieces=HELLO, last=completed),
        "mmmmmmccccmmme",
        keepalives=1,
        text="Hello there!",
    ),
    Example(
        name="speech",
        dialect=OPENAI,
        stream=sse({"type": "speech.audio.delta", "audio": "AAAA"})
        + sse(
            {
                "type": "speech.audio.done",
                "usage": {"input_tokens": 14, "output_tokens": 101, "total_tokens": 115},
            }
        ),
        kinds="ce",
        finish_reasons=("completed",),
        usage=tokens(14, 101),
        text=None,
    ),
    Example(
        name="a picture in one piece",
        dialect=OPENAI,
        stream=sse(
            {
                "type": "image_generation.completed",
                "b64_json": "AAAA",
                "usage": {"input_tokens": 50, "output_tokens": 50, "total_tokens": 100},
            },
            "image_generation.completed",
        ),
        kinds="e",
        finish_reasons=("completed",),
        usage=tokens(50, 50),
    ),
]

CUT = [
    bad("after it was created", stream(), "mm"),
    bad(
        "after some tokens",
        stream(before=lambda event: event("response.output_text.delta", **ITEM, delta="Hello", logprobs=[])),
        "mmc",
        usage=tokens(None, 2, estimated=True),
        text="Hello",
    ),
    bad(
        "after a whole message, since another may follow",
        stream(pieces=HELLO),
        "mmmmccccmmm",
        usage=tokens(None, 3, estimated=True),
        text="Hello there!",
    ),
    Example(name="no bytes at all", dialect=OPENAI, stream=b"", kinds="", outcome=EMPTY),
]

ERRORS = [
    Example(
        name="at the top level",
        dialect=OPENAI,
        stream=sse(
            {"type": "error", "code": "server_error", "message": "boom", "param": None, "sequence_number": 3},
            "error",
        ),
        kinds="!",
        outcome=(Verdict.FAILURE, Scope.TARGET, "server_error"),
        status=500,
    ),
    bad(
        "nested, as it is sent",
        stream(
            last=lambda event: event(
                "error",
                error={
                    "type": "too_many_requests",
                    "code": "too_many_requests",
                    "message": "Too Many Requests",
                    "param": None,
                },
            )
        ),
        "mm!",
        outcome=(Verdict.THROTTLED, Scope.TARGET, "too_many_requests"),
        status=429,
    ),
    bad(
        "a response that failed",
        stream(
            last=lambda event: event(
                "response.failed",
                response=response(
                    "failed", error={"code": "rate_limit_exceeded", "message": "Rate limit reached"}
                ),
            )
        ),
        "mm!",
        outcome=(Verdict.THROTTLED, Scope.TARGET, "rate_limit_exceeded"),
        status=429,
    ),
    bad(
        "a response that failed after some text, with usage",
        stream(
            pieces=HELLO,
            last=lambda event: event(
                "response.failed",
                response=response("failed", error={"code": "server_error", "message": "m"}, usage=USAGE),
            ),
        ),
        "mmmmccccmmm!",
        outcome=(Verdict.FAILURE, Scope.TARGET, "server_error"),
        status=500,
        usage=tokens(37, 11, cached=16, reasoning=6),
        text="Hello there!",
    ),
    bad(
        "a response that failed without a word",
        stream(last=lambda event: event("response.failed", response=response("failed"))),
        "mm!",
        outcome=(Verdict.FAILURE, Scope.TARGET, "500"),
        status=500,
    ),
    bad(
        "a context that is too long",
        stream(
            last=lambda event: event(
                "error", code="context_length_exceeded", message="exceeds the context window", param="input"
            )
        ),
        "mm!",
        outcome=(Verdict.FATAL, Scope.TARGET, "context_length_exceeded"),
        status=400,
        retryable=False,
    ),
]

EXAMPLES = [*WHOLE, *CUT, *ERRORS]
