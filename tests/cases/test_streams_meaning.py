"""Field cases: what events of streams, their ends, and whole replies mean.

STR-16 asks for more than is decided here: who injects `include_usage`, and leaves the chunk out again, is the
door. Here the chunk can be told from all others. What a door does about a failure is its business too.
"""

import json
from collections.abc import Iterable

import pytest

from resilient_llm.message import Request
from resilient_llm.outcome import CANCELLED, Outcome, Scope, Verdict
from resilient_llm.providers import (
    ANTHROPIC,
    GEMINI,
    OPENAI,
    Dialect,
    EventKind,
    StreamReader,
    is_event_stream,
    read_body,
)

CONTENT, META, END, ERROR = EventKind.CONTENT, EventKind.META, EventKind.END, EventKind.ERROR


def data(body: object, event: str = "") -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def says(text: str, finish: str | None = None) -> bytes:
    return data({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


ROLE = data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = data("[DONE]")
START = data(
    {"type": "message_start", "message": {"id": "msg_1", "model": "claude", "usage": {"input_tokens": 9}}},
    "message_start",
)
DELTA = data(
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    "content_block_delta",
)


def read(dialect: Dialect, reads: Iterable[bytes]) -> tuple[list[EventKind], Outcome, StreamReader]:
    reader = StreamReader(dialect)
    kinds = [kind for chunk in reads for kind, _ in reader.feed(chunk)]
    return kinds, reader.close(), reader


def every_split(stream: bytes) -> list[list[bytes]]:
    halves = [[stream[:at], stream[at:]] for at in range(1, len(stream))]
    return [[stream], [stream[at : at + 1] for at in range(len(stream))], *halves]


@pytest.mark.parametrize(
    ("kind", "status", "verdict", "scope"),
    [
        ("overloaded_error", 529, Verdict.FAILURE, Scope.UPSTREAM),
        ("rate_limit_error", 429, Verdict.THROTTLED, Scope.TARGET),
        ("api_error", 500, Verdict.FAILURE, Scope.TARGET),
        ("invalid_request_error", 400, Verdict.FATAL, Scope.REQUEST),
    ],
)
@pytest.mark.parametrize(
    "before", [b"", START, START + DELTA], ids=["first", "after the start", "after text"]
)
def test_str_01_an_error_event_counts_for_what_it_names(
    before: bytes, kind: str, status: int, verdict: Verdict, scope: Scope
) -> None:
    error = data({"type": "error", "error": {"type": kind, "message": "m"}}, "error")
    kinds, outcome, reader = read(ANTHROPIC, [before, error])
    assert kinds[-1] is ERROR
    assert (outcome.verdict, outcome.scope, outcome.status, outcome.error_type) == (
        verdict,
        scope,
        status,
        kind,
    )
    assert reader.has_content is (CONTENT in kinds)  # which is what decides whether it may be tried again
    assert reader.failure is not None


@pytest.mark.parametrize(
    "event",
    [
        data(
            {"type": "error", "code": "server_error", "message": "boom", "param": None, "sequence_number": 3},
            "error",
        ),
        data({"type": "error", "code": "server_error", "message": "boom"}),
        data({"code": "server_error", "message": "boom"}, "error"),
        data({"error": {"code": "server_error", "message": "boom"}}),
        data({"type": "error", "error": {"code": "server_error", "message": "boom"}}, "error"),
        data(
            {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error"}}}
        ),
    ],
    ids=["as documented", "by its type", "by its event", "by its key", "nested", "failed response"],
)
def test_str_02_an_error_of_a_response_is_seen_wherever_it_stands(event: bytes) -> None:
    kinds, outcome, _ = read(OPENAI, [event])
    assert kinds == [ERROR]
    assert (outcome.verdict, outcome.status, outcome.error_type) == (Verdict.FAILURE, 500, "server_error")


@pytest.mark.parametrize(
    ("dialect", "stream"),
    [
        (OPENAI, says("Hel") + says("lo")),
        (OPENAI, ROLE),
        (OPENAI, ROLE + DONE),
        (OPENAI, data({"type": "response.output_text.delta", "delta": "Hello"})),
        (ANTHROPIC, START + DELTA + DELTA),
        (GEMINI, data({"candidates": [{"content": {"parts": [{"text": "Hello"}]}}]})),
    ],
    ids=["chat", "role only", "role and a marker", "response", "message", "content"],
)
def test_str_03_without_proof_of_its_end_a_stream_was_cut(dialect: Dialect, stream: bytes) -> None:
    for reads in every_split(stream)[:40]:
        _, outcome, reader = read(dialect, reads)
        assert (outcome.verdict, outcome.error_type) == (Verdict.FAILURE, "truncated")
        assert outcome.retryable
        assert outcome.ambiguous  # it may be billed
        assert not reader.complete


def test_str_03_what_is_written_instead_is_no_end_but_an_error() -> None:
    for dialect, path in ((OPENAI, "chat/completions"), (OPENAI, "responses"), (ANTHROPIC, "messages")):
        request = Request("POST", f"https://h.example/v1/{path}", [])
        event = dialect.error_event(request, 502, "the stream broke off", code="truncated")
        kinds, outcome, _ = read(dialect, [event])
        assert kinds == [ERROR]
        assert not outcome.ok
        assert b"[DONE]" not in event


@pytest.mark.parametrize(
    "stream",
    [b"", b": ping\n\n: ping\n\n", b"data:\n\n", DONE, b"\n\n\n"],
    ids=["no bytes", "comments", "keep-alives", "a marker that a proxy added", "blank lines"],
)
@pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC, GEMINI], ids=lambda dialect: dialect.name)
def test_str_07_an_empty_stream_is_a_failure(dialect: Dialect, stream: bytes) -> None:
    _, outcome, reader = read(dialect, [stream])
    assert (outcome.verdict, outcome.error_type, outcome.retryable) == (Verdict.FAILURE, "empty_stream", True)
    assert outcome.usage is None  # unknown, which is not zero
    assert not reader.has_content


def test_str_07_only_the_end_decides_that_a_stream_is_empty() -> None:
    reader = StreamReader(OPENAI)
    for _ in range(20):
        reader.feed(b": ping\n\n")
        assert reader.failure is None
    reader.feed(says("Hello", "stop") + DONE)
    assert reader.complete
    assert reader.close().ok


def test_str_16_a_chunk_that_only_brings_usage_can_be_told_from_the_rest() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
    stream = [says("Hello", "stop"), data(last), data({"choices": [], "usage": usage}), DONE]
    kinds, outcome, _ = read(OPENAI, stream)
    assert kinds == [CONTENT, META, EventKind.USAGE, END]
    assert outcome.usage is not None
    assert (outcome.usage.input_tokens, outcome.usage.output_tokens) == (3, 1)


def test_str_17_what_a_reply_is_its_status_and_content_type_decide() -> None:
    headers = [(b"Content-Type", b"application/json"), (b"Content-Length", b"58")]
    body = json.dumps({"error": {"message": "no", "code": "invalid_api_key"}}).encode()
    assert not is_event_stream(headers)  # though one was asked for
    outcome, _ = read_body(OPENAI, 401, headers, body, operation="chat")
    assert (outcome.verdict, outcome.scope, outcome.status) == (Verdict.FATAL, Scope.CREDENTIAL, 401)


@pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC, GEMINI], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("keepalive", [b"data:\n\n", b"data: \n\n", b"data\n\n"])
def test_sse_06_an_event_without_data_keeps_alive_and_no_more(dialect: Dialect, keepalive: bytes) -> None:
    kinds, _, reader = read(dialect, [keepalive, says("Hello"), keepalive])
    assert (kinds[0], kinds[2]) == (META, META)
    assert (reader.keepalives, reader.malformed) == (2, 0)


@pytest.mark.parametrize("keepalive", [b"data: : keepalive\n\n", b": OPENROUTER PROCESSING\n\n"])
def test_sse_07_a_comment_is_one_even_as_data(keepalive: bytes) -> None:
    kinds, outcome, reader = read(OPENAI, [keepalive, says("Hello", "stop"), keepalive, DONE])
    assert [kind for kind in kinds if kind is not META] == [CONTENT, END]
    assert (reader.keepalives, reader.malformed) == (2, 0)
    assert outcome.ok


FINISH = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":3,"total_tokens":4}}'
)


@pytest.mark.parametrize(
    ("tail", "error_type"),
    [
        (FINISH, None),
        (FINISH + b"\n", None),
        (FINISH + b"\r\n", None),
        (b"data: [DONE]", None),
        (b'data: {"choices":[{"de', "truncated"),
        (FINISH[:-1], "truncated"),
        (FINISH + b"\n\n" + FINISH[:30], "truncated"),
    ],
    ids=[
        "no newline",
        "one",
        "CRLF",
        "marker",
        "cut",
        "cut at the last byte",
        "cut after a reason to finish",
    ],
)
def test_sse_12_an_unfinished_event_counts_if_it_is_whole(tail: bytes, error_type: str | None) -> None:
    for reads in every_split(says("Hello") + tail):
        _, outcome, reader = read(OPENAI, reads)
        assert outcome.error_type == error_type
        if outcome.ok and tail.startswith(FINISH):
            assert reader.answer.finish_reasons == ("stop",)
            assert outcome.usage is not None
            assert (outcome.usage.input_tokens, outcome.usage.output_tokens) == (3, 1)


@pytest.mark.parametrize("tail", [FINISH, b"data: [DONE]"])
def test_sse_12_but_never_after_a_transport_error(tail: bytes) -> None:
    reset = Outcome(verdict=Verdict.FAILURE, error_type="read_error", retryable=True, ambiguous=True)
    for end in (reset, CANCELLED):
        reader = StreamReader(OPENAI)
        reader.feed(says("Hello") + tail)
        outcome = reader.interrupted(end)
        assert outcome.error_type == end.error_type
        assert outcome.usage is not None
        assert outcome.usage.estimated
        assert reader.answer.finish_reasons == ()


@pytest.mark.parametrize(
    "chunk",
    [
        {"id": "", "choices": [], "prompt_filter_results": [{"prompt_index": 0}]},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 5}},
        {"choices": [{"index": 0, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": None}]},
        {"choices": []},
        {"choices": None},
        {},
    ],
    ids=str,
)
def test_sse_16_a_chunk_without_a_usable_choice_is_no_content_and_no_end(chunk: object) -> None:
    kinds, outcome, reader = read(OPENAI, [data(chunk)])
    assert kinds in ([META], [EventKind.USAGE])
    assert not reader.has_content
    assert reader.failure is None
    assert outcome.error_type == "truncated"
    assert read(OPENAI, [data(chunk), says("Hello", "stop"), data(chunk), DONE])[1].ok


FILTERED = {
    "error": {
        "code": "content_filter",
        "status": 400,
        "innererror": {"code": "ResponsibleAIPolicyViolation"},
    }
}


def test_cls_05_a_filtered_prompt_is_the_prompts_fault_in_either_shape() -> None:
    whole, _ = read_body(OPENAI, 400, [(b"content-type", b"application/json")], json.dumps(FILTERED).encode())
    kinds, streamed, _ = read(OPENAI, [data(FILTERED)])
    assert kinds == [ERROR]
    for outcome in (whole, streamed):
        assert (outcome.verdict, outcome.scope) == (Verdict.FATAL, Scope.REQUEST)
        assert (outcome.error_type, outcome.status, outcome.retryable) == ("content_filter", 400, False)


@pytest.mark.parametrize(
    ("body", "status", "verdict"),
    [
        ({"error": {"code": 429, "message": "..."}}, 429, Verdict.THROTTLED),
        ({"choices": [{"finish_reason": "error", "error": {"code": 502}}]}, 502, Verdict.FAILURE),
    ],
    ids=["a", "b"],
)
def test_cls_08_an_error_in_a_200_is_one_in_a_body_and_in_a_stream(
    body: object, status: int, verdict: Verdict
) -> None:
    whole, _ = read_body(OPENAI, 200, [], json.dumps(body).encode(), operation="chat")
    kinds, streamed, _ = read(OPENAI, [data(body)])
    assert kinds == [ERROR]
    for outcome in (whole, streamed):
        assert (outcome.verdict, outcome.status, outcome.retryable) == (verdict, status, True)
