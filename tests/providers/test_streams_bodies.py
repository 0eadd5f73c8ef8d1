"""What whole replies mean: a table of bodies for each API, and everything that a 200 may be instead."""

import gzip
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.message import Headers
from resilient_llm.outcome import Scope, Usage, Verdict
from resilient_llm.providers import (
    ANTHROPIC,
    BEDROCK,
    DIALECTS,
    GEMINI,
    OPENAI,
    UNKNOWN,
    Dialect,
    is_event_stream,
    is_json,
    media_type,
    read_body,
)
from tests.providers.streams import anthropic, gemini, openai_chat, openai_responses
from tests.providers.streams.example import tokens
from tests.providers.test_properties import BODIES, HEADERS, SPEAKERS, check

JSON = [(b"content-type", b"application/json; charset=utf-8")]
SUCCESS = (Verdict.SUCCESS, Scope.TARGET, None)
Row = tuple[Verdict, Scope, str | None]


@dataclass(frozen=True)
class Example:
    """Say what is read in one body."""

    name: str
    dialect: Dialect
    body: Any
    usage: Usage | None = None
    model: str | None = None
    id: str | None = None
    finish_reasons: tuple[str, ...] = ()
    outcome: Row = SUCCESS
    status: int | None = None

    def __str__(self) -> str:
        return f"{self.dialect.name}: {self.name}"


def chat(*choices: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "gpt-4o",
        "choices": list(choices),
        **extra,
    }


def choice(finish: str | None, **message: Any) -> dict[str, Any]:
    return {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}


RESPONSE = openai_responses.response(
    "completed",
    output=[{"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}],
    usage=openai_responses.USAGE,
)
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-sonnet-4-5",
    "content": [{"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "text", "text": "Hi"}],
    "stop_reason": "end_turn",
    "usage": {
        "input_tokens": 10,
        "cache_creation_input_tokens": 5,
        "cache_read_input_tokens": 3,
        "output_tokens": 7,
    },
}
CONTENT = {
    "candidates": [{"content": {"parts": [{"text": "Hi"}]}, "finishReason": "STOP"}],
    "usageMetadata": {"promptTokenCount": 4, "candidatesTokenCount": 2, "thoughtsTokenCount": 30},
    "modelVersion": "gemini-2.5-flash",
    "responseId": "r1",
}

EXAMPLES = [
    Example(
        "chat completion",
        OPENAI,
        chat(choice("stop", content="Hi"), usage=openai_chat.USAGE),
        tokens(19, 10, cached=8, reasoning=4),
        "gpt-4o",
        "chatcmpl-1",
        ("stop",),
    ),
    Example(
        "chat completion without usage",
        OPENAI,
        chat(choice("stop", content="Hello, you")),
        tokens(None, 3, estimated=True),
        "gpt-4o",
        "chatcmpl-1",
        ("stop",),
    ),
    Example(
        "two choices, one of which failed",
        OPENAI,
        chat(choice("length", content="x"), {**choice("error"), "index": 1}, usage=openai_chat.USAGE),
        tokens(19, 10, cached=8, reasoning=4),
        "gpt-4o",
        "chatcmpl-1",
        ("length", "error"),
    ),
    Example(
        "completion",
        OPENAI,
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": "davinci-002",
            "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
        },
        tokens(5, 7),
        "davinci-002",
        "cmpl-1",
        ("length",),
    ),
    Example(
        "completion with more tokens than there are",
        OPENAI,
        chat(
            choice("stop", content="Hello, you"),
            usage={"prompt_tokens": 10**20, "completion_tokens": 10**9 + 1, "total_tokens": 10**20},
        ),
        tokens(None, 3, estimated=True),
        "gpt-4o",
        "chatcmpl-1",
        ("stop",),
    ),
    Example(
        "embeddings",
        OPENAI,
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.1]}],
            "model": "text-embedding-3-small",
            "usage": {"prompt_tokens": 8, "total_tokens": 8},
        },
        tokens(8, 0),
        "text-embedding-3-small",
    ),
    Example(
        "embeddings that only count",
        OPENAI,
        {"object": "list", "data": [], "model": "voyage-3", "usage": {"total_tokens": 10}},
        tokens(10, None, estimated=True),
        "voyage-3",
    ),
    Example(
        "response",
        OPENAI,
        RESPONSE,
        tokens(37, 11, cached=16, reasoning=6),
        openai_responses.MODEL,
        openai_responses.ID,
        ("completed",),
    ),
    Example(
        "incomplete response",
        OPENAI,
        {**RESPONSE, "status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
        tokens(37, 11, cached=16, reasoning=6),
        openai_responses.MODEL,
        openai_responses.ID,
        ("content_filter",),
    ),
    Example(
        "response to come",
        OPENAI,
        {**RESPONSE, "status": "queued", "usage": None},
        None,
        openai_responses.MODEL,
        openai_responses.ID,
    ),
    Example(
        "failed response",
        OPENAI,
        {**RESPONSE, "status": "failed", "usage": None, "error": {"code": "server_error", "message": "m"}},
        None,
        outcome=(Verdict.FAILURE, Scope.TARGET, "server_error"),
        status=500,
    ),
    Example(
        "response that failed without a word",
        OPENAI,
        {**RESPONSE, "status": "failed", "usage": None},
        None,
        openai_responses.MODEL,
        openai_responses.ID,
        outcome=(Verdict.FAILURE, Scope.TARGET, "500"),
        status=500,
    ),
    Example("list of models", OPENAI, {"object": "list", "data": []}),
    Example(
        "message",
        ANTHROPIC,
        MESSAGE,
        tokens(18, 7, cached=3),
        "claude-sonnet-4-5",
        "msg_1",
        ("end_turn",),
    ),
    Example(
        "call of a tool",
        ANTHROPIC,
        {
            **MESSAGE,
            "stop_reason": "tool_use",
            "usage": None,
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}],
        },
        tokens(None, 2, estimated=True),
        "claude-sonnet-4-5",
        "msg_1",
        ("tool_use",),
    ),
    Example(
        "text completion",
        ANTHROPIC,
        {
            "type": "completion",
            "id": "compl_1",
            "completion": "Hi",
            "stop_reason": "stop_sequence",
            "model": "claude-2.1",
        },
        tokens(None, 1, estimated=True),
        "claude-2.1",
        "compl_1",
        ("stop_sequence",),
    ),
    Example("count of tokens", ANTHROPIC, {"input_tokens": 2095}),
    Example("content", GEMINI, CONTENT, tokens(4, 32, reasoning=30), "gemini-2.5-flash", "r1", ("STOP",)),
    Example(
        "a stream as a list",
        GEMINI,
        [
            {"candidates": [{"content": {"parts": [{"text": "H"}]}}], "modelVersion": "gemini-2.5-flash"},
            CONTENT,
        ],
        tokens(4, 32, reasoning=30),
        "gemini-2.5-flash",
        "r1",
        ("STOP",),
    ),
    Example(
        "a stream as a list that ends with an error",
        GEMINI,
        [CONTENT, {"error": {"code": 503, "message": "m", "status": "UNAVAILABLE"}}],
        tokens(4, 32, reasoning=30),
        "gemini-2.5-flash",
        "r1",
        ("STOP",),
        (Verdict.FAILURE, Scope.TARGET, "UNAVAILABLE"),
        503,
    ),
    Example(
        "a prompt that was blocked",
        GEMINI,
        gemini.BLOCKED,
        tokens(8, None, estimated=True),
        outcome=(Verdict.FATAL, Scope.REQUEST, "content_filter"),
        status=400,
    ),
    Example("count of tokens", GEMINI, {"totalTokens": 31}),
    Example(
        "interaction",
        GEMINI,
        {
            "id": "i1",
            "object": "interaction",
            "model": "gemini-3-pro",
            "status": "requires_action",
            "usage": {"total_input_tokens": 5, "total_output_tokens": 2, "total_tokens": 7},
        },
        tokens(5, 2),
        "gemini-3-pro",
        "i1",
        ("requires_action",),
    ),
    Example(
        "interaction that failed",
        GEMINI,
        {"id": "i1", "object": "interaction", "status": "failed", "errors": [{"code": "unavailable"}]},
        None,
        None,
        "i1",
        outcome=(Verdict.FAILURE, Scope.TARGET, "unavailable"),
        status=503,
    ),
    Example(
        "Converse",
        BEDROCK,
        {
            "output": {
                "message": {"role": "assistant", "content": [{"text": "Hi"}, {"toolUse": {"name": "f"}}]}
            },
            "stopReason": "end_turn",
            "usage": {
                "inputTokens": 30,
                "outputTokens": 60,
                "totalTokens": 97,
                "cacheReadInputTokens": 5,
                "cacheWriteInputTokens": 2,
            },
        },
        tokens(37, 60, cached=5),
        finish_reasons=("end_turn",),
    ),
    Example(
        "InvokeModel", BEDROCK, MESSAGE, tokens(18, 7, cached=3), "claude-sonnet-4-5", "msg_1", ("end_turn",)
    ),
    Example(
        "Converse without usage",
        BEDROCK,
        {"output": {"message": {"content": [{"text": "Hello"}]}}, "stopReason": "max_tokens"},
        tokens(None, 2, estimated=True),
        finish_reasons=("max_tokens",),
    ),
    Example("nothing known", BEDROCK, {"embedding": [0.1], "inputTextTokenCount": 3}),
    *(
        Example(f"known by its shape, {status}", UNKNOWN, body, usage, model, name, finish)
        for status, body, usage, model, name, finish in (
            (
                "a completion",
                chat(choice("stop", content="x"), usage=openai_chat.USAGE),
                tokens(19, 10, cached=8, reasoning=4),
                "gpt-4o",
                "chatcmpl-1",
                ("stop",),
            ),
            ("a message", MESSAGE, tokens(18, 7, cached=3), "claude-sonnet-4-5", "msg_1", ("end_turn",)),
            ("content", CONTENT, tokens(4, 32, reasoning=30), "gemini-2.5-flash", "r1", ("STOP",)),
            ("something", {"ok": True}, None, None, None, ()),
        )
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_body_means(example: Example, compressed: bool) -> None:
    body = json.dumps(example.body).encode()
    headers = list(JSON)
    if compressed:
        body = gzip.compress(body)
        headers.append((b"Content-Encoding", b"gzip"))
    outcome, answer = read_body(example.dialect, 200, headers, body)
    assert (outcome.verdict, outcome.scope, outcome.error_type) == example.outcome
    assert outcome.status == example.status
    assert outcome.usage == example.usage
    if outcome.ok or example.model or example.id:
        assert (answer.model, answer.id, answer.finish_reasons) == (
            example.model,
            example.id,
            example.finish_reasons,
        )


EMPTY, CUT, OTHER = "empty_body", "truncated", "unexpected_body"
WHOLE = json.dumps(chat(choice("stop", content="Hi"))).encode()
HTML = b"<!DOCTYPE html><html><body>Just a moment...</body></html>"


@pytest.mark.parametrize(
    ("operation", "content_type", "body", "error_type"),
    [
        ("chat", b"application/json", b"", EMPTY),
        ("chat", None, b"", EMPTY),
        ("speech", b"audio/mpeg", b"", EMPTY),
        ("request", b"application/json", b"", None),  # the answer to a HEAD, or to a DELETE
        ("request", None, b"", None),
        ("chat", b"application/json", WHOLE[:-1], CUT),
        ("chat", b"application/json", WHOLE[: len(WHOLE) // 2], CUT),
        ("chat", b"application/vnd.api+json", WHOLE[:20], CUT),
        ("chat", b"text/plain", WHOLE[:20], CUT),
        ("request", b"application/json", b'{"ok": tr', CUT),
        ("chat", b"application/json", b" \n", CUT),
        ("chat", b"text/html; charset=utf-8", HTML, OTHER),
        ("embeddings", b"text/plain", b"upstream connect error", OTHER),
        ("chat", b"application/octet-stream", b"\x00\x01", OTHER),
        ("generate_content", None, b"hello", OTHER),
        ("chat", b"text/plain", WHOLE, None),  # what it is counts, not what it is called
        ("chat", None, WHOLE, None),
        ("chat", b"application/json", b" null\n", OTHER),
        ("chat", b"application/json", b'"x"', OTHER),
        ("request", b"application/json", b"null", None),
        ("request", b"application/json", b"true", None),
        ("transcription", b"text/plain", b"Hello there", None),
        ("transcription", b"text/vtt", b"WEBVTT", None),
        ("transcription", b"text/plain", b"", None),  # nothing was said
        ("translation", b"text/plain", b"", None),
        ("transcription", b"application/json", b"", EMPTY),
        ("transcription", None, b"", EMPTY),
        # What is not all UTF-8 is whole all the same, as its caller will see.
        ("chat", b"application/json", WHOLE.replace(b"Hi", b"H\xff"), None),
        ("chat", b"application/json", WHOLE.replace(b"Hi", b"H\xff")[:-1], CUT),
        ("chat", b"application/json", b'{"\x00\xff', CUT),
        ("speech", b"audio/mpeg", b"\xff\xf3", None),
        ("request", b"text/html", HTML, None),
        ("chat", b"application/vnd.amazon.eventstream", b"\x00\x00\x00", None),
        ("chat", b"application/x-ndjson", b'{"a":1}\n{"b":2}\n', None),
    ],
)
def test_a_200_may_be_no_answer(
    operation: str, content_type: bytes | None, body: bytes, error_type: str | None
) -> None:
    headers = [] if content_type is None else [(b"Content-Type", content_type)]
    outcome, answer = read_body(OPENAI, 200, headers, body, operation=operation)
    assert outcome.error_type == error_type
    assert outcome.ok is (error_type is None)
    if not outcome.ok:
        assert (outcome.verdict, outcome.scope, outcome.status) == (Verdict.FAILURE, Scope.TARGET, 200)
        assert outcome.retryable
        assert outcome.ambiguous
        assert answer.usage is None


@pytest.mark.parametrize("status", [204, 205, 301, 304])
def test_a_reply_without_a_body_needs_none(status: int) -> None:
    assert read_body(OPENAI, status, JSON, b"", operation="moderation")[0].ok
    assert read_body(UNKNOWN, status, JSON, b"", operation="chat")[0].ok


SSE_ANSWER = b'data: {"choices":[{"delta":{"content":"Hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
GZIP = [*JSON, (b"content-encoding", b"gzip")]
NO_ANSWERS = {
    "204": (204, JSON, b"", "empty_body"),
    "205": (205, JSON, b"", "empty_body"),
    "an empty object": (200, JSON, b"{}", "unexpected_body"),
    "an empty list": (200, JSON, b"[]", "unexpected_body"),
    "a list of nothing": (200, JSON, b"[{}, 1]", "unexpected_body"),
    "the state of something": (200, JSON, b'{"status": "ok"}', "unexpected_body"),
    "a stream": (200, JSON, SSE_ANSWER, "unexpected_body"),
    "not gzip": (200, GZIP, b'{"choices": []}', "unexpected_body"),
}


@pytest.mark.parametrize("operation", ["chat", "embeddings", "generate_content", "text_completion"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("reply", NO_ANSWERS.values(), ids=list(NO_ANSWERS))
def test_what_has_nothing_of_an_answer_is_none(
    reply: tuple[int, Headers, bytes, str], dialect: Dialect, operation: str
) -> None:
    status, headers, body, error_type = reply
    outcome, _ = read_body(dialect, status, headers, body, operation=operation, streamed=False)
    if dialect is BEDROCK and body is not SSE_ANSWER:  # what models answer there has any shape
        assert outcome.ok
    else:
        assert outcome.verdict is Verdict.FAILURE
        assert outcome.error_type == error_type or (body is SSE_ANSWER and dialect is not OPENAI)
        assert outcome.retryable
        assert outcome.ambiguous
    if body is not SSE_ANSWER:
        assert read_body(dialect, status, headers, body, operation="request")[0].ok


def test_an_encoding_that_nobody_knows_may_be_right() -> None:
    headers = [*JSON, (b"content-encoding", b"rot13")]
    assert read_body(OPENAI, 200, headers, b"x", operation="chat")[0].ok


def test_an_answer_in_one_piece_is_none_to_who_reads_a_stream() -> None:
    body = b'{"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}'
    outcome, answer = read_body(OPENAI, 200, JSON, body, operation="chat", streamed=True)
    assert (outcome.verdict, outcome.error_type) == (Verdict.FAILURE, "unexpected_body")
    assert answer.finish_reasons == ("stop",)
    assert read_body(OPENAI, 200, JSON, body, operation="chat", streamed=False)[0].ok


@pytest.mark.parametrize("dialect", [*DIALECTS, UNKNOWN], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("status", [400, 401, 429, 503, 529])
def test_an_error_is_what_its_status_and_body_say(dialect: Dialect, status: int) -> None:
    body = dialect.error_body(status, "m")
    outcome, _ = read_body(dialect, status, JSON, body, operation="chat")
    assert outcome == dialect.classify(status, JSON, body)
    assert not outcome.ok


def test_a_stream_that_does_not_say_so_is_read_as_one() -> None:
    for stream, ok in ((openai_chat.WHOLE[0].stream, True), (openai_chat.CUT[0].stream, False)):
        outcome, answer = read_body(OPENAI, 200, JSON, stream, operation="chat")
        assert outcome.ok is ok
        assert answer.model == openai_chat.MODEL
    outcome, answer = read_body(ANTHROPIC, 200, [], b"\n" + anthropic.WHOLE[0].stream)
    assert outcome.usage == anthropic.WHOLE[0].usage


def test_what_cannot_be_decoded_or_is_too_long_is_not_judged() -> None:
    body = json.dumps({"error": {"code": 429}}).encode()
    assert read_body(OPENAI, 200, [*JSON, (b"content-encoding", b"snappy")], body)[0].ok
    assert read_body(OPENAI, 200, JSON, body, max_size=len(body) - 1)[0].ok
    assert not read_body(OPENAI, 200, JSON, body, max_size=len(body))[0].ok
    packed = gzip.compress(body + b" " * 1_000_000)
    assert read_body(OPENAI, 200, [*JSON, (b"content-encoding", b"gzip")], packed, max_size=1000)[0].ok


@pytest.mark.parametrize(
    ("value", "stream", "json_"),
    [
        (b"text/event-stream", True, False),
        (b"Text/Event-Stream; charset=utf-8", True, False),
        (b"application/json", False, True),
        (b"application/problem+json;charset=utf-8", False, True),
        (b"text/plain", False, False),
        (None, False, False),
    ],
)
def test_content_types(value: bytes | None, stream: bool, json_: bool) -> None:
    headers = [] if value is None else [(b"Content-Type", value)]
    assert (is_event_stream(headers), is_json(media_type(headers))) == (stream, json_)


@given(
    dialect=SPEAKERS,
    status=st.integers(200, 599),
    headers=HEADERS,
    content_type=st.sampled_from([b"", b"application/json", b"text/html", b"text/event-stream"]),
    encoding=st.sampled_from([b"identity", b"gzip", b"x"]),
    body=BODIES,
    operation=st.sampled_from(["chat", "request", "speech"]),
)
def test_every_body_has_an_outcome(  # noqa: PLR0917 - given, not passed
    dialect: Dialect,
    status: int,
    headers: list[tuple[bytes, bytes]],
    content_type: bytes,
    encoding: bytes,
    body: bytes | None,
    operation: str,
) -> None:
    headers = [*headers, (b"content-type", content_type), (b"content-encoding", encoding)]
    outcome, answer = read_body(dialect, status, headers, body or b"", operation=operation)
    assert outcome.usage is None or outcome.ok or outcome.usage.estimated
    assert answer.characters >= 0
    if not outcome.ok and status >= 400:
        check(outcome)
