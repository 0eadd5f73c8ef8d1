"""Streams of the Messages API, and of servers compatible with it."""

from __future__ import annotations

from typing import Any

from resilient_llm.outcome import Scope, Verdict
from resilient_llm.providers import ANTHROPIC
from tests.providers.streams.example import EMPTY, TRUNCATED, Example, sse, tokens

ID = "msg_1nZdL29xx5MUA1yADyHTEsnR8uuvGzszyY"
MODEL = "claude-sonnet-4-5-20250929"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def start(**usage: Any) -> bytes:
    message: dict[str, Any] = {
        "id": ID,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": MODEL,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 25, "output_tokens": 1, **usage},
    }
    return event("message_start", message=message)


def block(content: dict[str, Any], *deltas: dict[str, Any], index: int = 0) -> bytes:
    return (
        event("content_block_start", index=index, content_block=content)
        + b"".join(event("content_block_delta", index=index, delta=delta) for delta in deltas)
        + event("content_block_stop", index=index)
    )


def text(*pieces: str, index: int = 0) -> bytes:
    deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
    return block({"type": "text", "text": ""}, *deltas, index=index)


def stop(reason: str = "end_turn", **usage: Any) -> bytes:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return event("message_delta", delta=delta, usage={"output_tokens": 15, **usage})


END = event("message_stop")
HELLO = text("Hello", "!", " You", " there")


def error(kind: str, message: str = "m") -> bytes:
    return event("error", error={"type": kind, "message": message}, request_id="req_011CSHoEeqs5C35K2UUqR7Fy")


def ok(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    known: dict[str, Any] = {
        "model": MODEL,
        "id": ID,
        "finish_reasons": ("end_turn",),
        "usage": tokens(25, 15),
    }
    return Example(name=name, dialect=ANTHROPIC, stream=stream, kinds=kinds, **{**known, **expected})


def bad(name: str, stream: bytes, kinds: str, **expected: Any) -> Example:
    known: dict[str, Any] = {"model": MODEL, "id": ID, "outcome": TRUNCATED}
    return Example(name=name, dialect=ANTHROPIC, stream=stream, kinds=kinds, **{**known, **expected})


WHOLE = [
    ok("text", start() + PING + HELLO + stop() + END, "mmmccccmme", text="Hello! You there", keepalives=1),
    ok(
        "thinking first",
        start()
        + block(
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "Let me"},
            {"type": "thinking_delta", "thinking": " see."},
            {"type": "signature_delta", "signature": "EqQBCgIYAhIM"},
        )
        + text("4", index=1)
        + stop(output_tokens_details={"thinking_tokens": 9})
        + END,
        "mmccmmmcmme",
        usage=tokens(25, 15, reasoning=9),
        text="4",
    ),
    ok(
        "thinking that is not shown",
        start()
        + block({"type": "redacted_thinking", "data": "EmwKAhgB"})
        + text("4", index=1)
        + stop()
        + END,
        "mcmmcmme",
        text=None,
    ),
    ok(
        "a call of a tool",
        start()
        + text("Okay")
        + block(
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
            {"type": "input_json_delta", "partial_json": ""},
            {"type": "input_json_delta", "partial_json": '{"location":'},
            {"type": "input_json_delta", "partial_json": ' "San'},
            {"type": "input_json_delta", "partial_json": ' Francisco"}'},
            index=1,
        )
        + stop("tool_use")
        + END,
        "mmcmcmcccmme",
        finish_reasons=("tool_use",),
        text=None,
    ),
    ok(
        "a search, with citations",
        start(cache_creation_input_tokens=100, cache_read_input_tokens=40)
        + block({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}})
        + block(
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
            index=1,
        )
        + block(
            {"type": "text", "text": ""},
            {
                "type": "citations_delta",
                "citation": {"type": "web_search_result_location", "cited_text": "x"},
            },
            {"type": "text_delta", "text": "Sunny."},
            index=2,
        )
        + stop(input_tokens=30, cache_creation_input_tokens=100, cache_read_input_tokens=40)
        + END,
        "mcmcmmccmme",
        usage=tokens(170, 15, cached=40),
        text=None,
    ),
    ok(
        "a prompt from the cache",
        start(cache_creation_input_tokens=0, cache_read_input_tokens=1000) + HELLO + stop() + END,
        "mmccccmme",
        usage=tokens(1025, 15, cached=1000),
        text="Hello! You there",
    ),
    ok(
        "a refusal",
        start() + text("I") + stop("refusal") + END,
        "mmcmme",
        finish_reasons=("refusal",),
        text="I",
    ),
    ok("nothing to say", start() + stop() + END, "mme"),
    ok("no terminal marker", start() + HELLO + stop(), "mmccccmm", text="Hello! You there"),
    ok(
        "a terminal marker of another API after its own",
        start() + HELLO + stop() + END + sse("[DONE]"),
        "mmccccmmem",
        text="Hello! You there",
    ),
    ok(
        "events without their names",
        (start() + HELLO + stop() + END).replace(b"event: ", b": "),
        "mmccccmme",
        keepalives=9,
        text="Hello! You there",
    ),
    ok(
        "events of the future",
        start() + event("content_block_glow", index=0) + HELLO + stop() + END,
        "mmmccccmme",
        text="Hello! You there",
    ),
    Example(
        name="a text completion",
        dialect=ANTHROPIC,
        stream=event("completion", id="compl_1", completion=" Hello", stop_reason=None, model="claude-2.1")
        + event("completion", id="compl_1", completion="!", stop_reason=None, model="claude-2.1")
        + event("completion", id="compl_1", completion="", stop_reason="stop_sequence", model="claude-2.1"),
        kinds="ccm",
        model="claude-2.1",
        id="compl_1",
        finish_reasons=("stop_sequence",),
        usage=tokens(None, 2, estimated=True),
        text=" Hello!",
    ),
]

CUT = [
    bad(
        "after some tokens",
        start() + HELLO,
        "mmccccm",
        usage=tokens(25, 4, estimated=True),
        text="Hello! You there",
    ),
    bad("after the start", start() + PING, "mm", usage=tokens(25, 1, estimated=True), keepalives=1),
    bad(
        "after a block began",
        start() + event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        "mm",
        usage=tokens(25, 1, estimated=True),
    ),
    bad(
        "in the middle of the terminal marker",
        start() + HELLO + stop() + b'event: message_stop\ndata: {"type":"mess',
        "mmccccmm",
        finish_reasons=("end_turn",),
        usage=tokens(25, 15),
        text="Hello! You there",
    ),
    Example(
        name="events without what they are about",
        dialect=ANTHROPIC,
        stream=event("message_start")
        + event("content_block_start", content_block=None)
        + event("content_block_delta", delta=None)
        + event("message_delta", delta=None),
        kinds="mmmm",
        outcome=TRUNCATED,
    ),
    Example(name="no bytes at all", dialect=ANTHROPIC, stream=b"", kinds="", outcome=EMPTY),
    Example(name="pings only", dialect=ANTHROPIC, stream=PING * 2, kinds="mm", outcome=EMPTY, keepalives=2),
    Example(name="the terminal marker only", dialect=ANTHROPIC, stream=END, kinds="e", outcome=TRUNCATED),
]

TYPES = {
    "overloaded_error": (Verdict.FAILURE, Scope.UPSTREAM, 529),
    "rate_limit_error": (Verdict.THROTTLED, Scope.TARGET, 429),
    "api_error": (Verdict.FAILURE, Scope.TARGET, 500),
    "timeout_error": (Verdict.FAILURE, Scope.TARGET, 504),
    "authentication_error": (Verdict.FATAL, Scope.CREDENTIAL, 401),
    "invalid_request_error": (Verdict.FATAL, Scope.REQUEST, 400),
}

ERRORS = [
    *(
        Example(
            name=f"{kind} as the first event",
            dialect=ANTHROPIC,
            stream=error(kind),
            kinds="!",
            outcome=(verdict, scope, kind),
            status=status,
            retryable=verdict is not Verdict.FATAL,
        )
        for kind, (verdict, scope, status) in TYPES.items()
    ),
    bad(
        "after some tokens",
        start() + HELLO + error("overloaded_error", "Overloaded"),
        "mmccccm!",
        outcome=(Verdict.FAILURE, Scope.UPSTREAM, "overloaded_error"),
        status=529,
        usage=tokens(25, 4, estimated=True),
        text="Hello! You there",
    ),
    bad(
        "after the start",
        start() + error("api_error"),
        "m!",
        outcome=(Verdict.FAILURE, Scope.TARGET, "api_error"),
        status=500,
        usage=tokens(25, 1, estimated=True),
    ),
]

EXAMPLES = [*WHOLE, *CUT, *ERRORS]
