"""Field cases: what replies and exceptions mean.

CLS-11 (which of several upstream errors the caller gets) is in `test_cls_11_routed`; of the others, the
part that is decided by reading one reply, one exception or one request.
"""

import json
from collections.abc import Callable

import httpcore
import httpx
import httpx2
import pytest

from resilient_llm.message import Request
from resilient_llm.outcome import Outcome, Scope, Verdict
from resilient_llm.providers import (
    ANTHROPIC,
    GEMINI,
    OPENAI,
    Problem,
    classify_exception,
    dialect_for,
    parse,
    read_problem,
)

HeaderList = list[tuple[bytes, bytes]]


def classify(status: int, body: object = None, headers: HeaderList | None = None) -> Outcome:
    content = b"" if body is None else json.dumps(body).encode()
    return OPENAI.classify(status, headers or [], content, wall_now=0.0)


def neutral_to_the_breaker(outcome: Outcome) -> bool:
    return outcome.verdict not in {Verdict.FAILURE, Verdict.SUCCESS}


def test_cls_01_insufficient_quota_is_no_rate_limit() -> None:
    error = {
        "type": "insufficient_quota",
        "code": "insufficient_quota",
        "message": "You exceeded your current quota...",
    }
    outcome = classify(429, {"error": error})
    assert not outcome.retryable
    assert (outcome.verdict, outcome.scope) == (Verdict.FATAL, Scope.CREDENTIAL)
    assert neutral_to_the_breaker(outcome)


def test_cls_04_context_overflow_may_only_move_to_a_larger_window() -> None:
    outcome = classify(400, {"error": {"code": "context_length_exceeded"}})
    assert not outcome.retryable
    assert (outcome.verdict, outcome.scope) == (Verdict.FATAL, Scope.TARGET)
    assert outcome.error_type == "context_length_exceeded"
    assert neutral_to_the_breaker(outcome)


@pytest.mark.parametrize("status", [400, 200], ids=["reply", "event of a stream"])
def test_cls_05_content_filter_is_no_throttle(status: int) -> None:
    innererror = {"code": "ResponsibleAIPolicyViolation"}
    outcome = classify(status, {"error": {"code": "content_filter", "status": 400, "innererror": innererror}})
    assert not outcome.retryable
    assert (outcome.verdict, outcome.scope) == (Verdict.FATAL, Scope.REQUEST)
    assert (outcome.error_type, outcome.status) == ("content_filter", 400)
    assert neutral_to_the_breaker(outcome)


def test_cls_06_overloaded_is_the_providers_trouble_not_the_callers() -> None:
    body = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    outcome = ANTHROPIC.classify(529, [], body)
    assert outcome.retryable
    assert (outcome.verdict, outcome.scope) == (Verdict.FAILURE, Scope.UPSTREAM)
    assert outcome.status == 529


@pytest.mark.parametrize(
    ("case", "status", "header", "retryable"),
    [
        ("a", 500, b"false", False),
        ("b", 400, b"true", True),
        ("c", 500, b"FALSE", False),
        ("d", 429, b"maybe", True),
    ],
    ids=["a", "b", "c", "d"],
)
def test_cls_07_x_should_retry_has_the_last_word(
    case: str, status: int, header: bytes, retryable: bool
) -> None:
    name = b"X-Should-Retry" if case == "c" else b"x-should-retry"
    outcome = classify(status, headers=[(name, header)])
    assert outcome.retryable is retryable
    # It says nothing new about the target: the breaker counts what it would have counted.
    assert outcome.verdict is classify(status).verdict


@pytest.mark.parametrize(
    ("body", "status", "verdict"),
    [
        ({"error": {"code": 429, "message": "..."}}, 429, Verdict.THROTTLED),
        ({"choices": [{"finish_reason": "error", "error": {"code": 502}}]}, 502, Verdict.FAILURE),
    ],
    ids=["a", "b"],
)
def test_cls_08_a_200_can_be_an_error(body: object, status: int, verdict: Verdict) -> None:
    outcome = classify(200, body)
    assert (outcome.status, outcome.verdict, outcome.retryable) == (status, verdict, True)


VLLM = {
    "object": "error",
    "type": "BadRequestError",
    "message": "This model's maximum context length is 8 tokens",
}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"error": "boom"}, Problem(message="boom")),
        (VLLM, Problem(message=VLLM["message"], type="BadRequestError")),
        ({"detail": "no"}, Problem(message="no")),
        ({"error": {"message": "m", "code": None}}, Problem(message="m")),
    ],
    ids=["string", "vllm", "detail", "null code"],
)
def test_cls_10_every_spelling_of_an_error_is_read(body: object, problem: Problem) -> None:
    content = json.dumps(body).encode()
    assert read_problem(parse(content)) == problem
    assert not classify(400, body).ok


def test_cls_10_vllms_context_overflow_is_understood() -> None:
    outcome = classify(400, VLLM)
    assert (outcome.verdict, outcome.scope) == (Verdict.FATAL, Scope.TARGET)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_cb_01_a_4xx_says_nothing_about_the_target(status: int) -> None:
    assert neutral_to_the_breaker(classify(status))


@pytest.mark.parametrize(
    ("delay", "quota", "row"),
    [
        (
            "45.837906927s",
            "GenerateRequestsPerMinutePerProjectPerModel",
            (Verdict.THROTTLED, Scope.TARGET, True),
        ),
        ("58s", "GenerateRequestsPerMinutePerProjectPerModel", (Verdict.THROTTLED, Scope.TARGET, True)),
        ("58s", "GenerateRequestsPerDayPerProjectPerModel", (Verdict.FATAL, Scope.CREDENTIAL, False)),
    ],
    ids=["nanoseconds", "seconds", "per day"],
)
def test_ra_13_gemini_says_when_and_which_quota(
    delay: str, quota: str, row: tuple[Verdict, Scope, bool]
) -> None:
    details = [
        {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [{"quotaId": quota}]},
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay},
    ]
    body = {"error": {"code": 429, "message": "m", "status": "RESOURCE_EXHAUSTED", "details": details}}
    outcome = GEMINI.classify(429, [], json.dumps(body).encode())
    assert (outcome.verdict, outcome.scope, outcome.retryable) == row
    assert outcome.retry_after == pytest.approx(float(delay[:-1]))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529])
def test_ra_14_retry_after_counts_on_every_retryable_status(status: int) -> None:
    outcome = classify(status, headers=[(b"retry-after", b"120")])
    assert outcome.retryable
    assert (outcome.retry_after, outcome.retry_after_source) == (120.0, "retry-after")


@pytest.mark.parametrize(
    ("path", "body", "repeat_safe"),
    [
        ("/v1/chat/completions", {"model": "m"}, True),
        ("/v1/embeddings", {"model": "m"}, True),
        ("/v1/messages", {"model": "m"}, True),
        ("/v1/responses", {"model": "m"}, True),
        ("/v1/responses", {"model": "m", "store": True}, False),
        ("/v1/responses", {"model": "m", "background": True}, False),
        ("/v1/files", None, False),
        ("/v1/batches", {"input_file_id": "file-1"}, False),
        ("/v1/messages/batches", {"requests": []}, False),
        ("/v1/fine_tuning/jobs", {"model": "m"}, False),
        ("/v1/threads", {}, False),
        ("/v1/threads/t/messages", {}, False),
        ("/v1/conversations/c/items", {}, False),
        ("/v1/sessions/s/events", {}, False),
        ("/anything/else", {}, False),
    ],
)
def test_rty_05_only_what_does_no_harm_twice_is_safe_to_repeat(
    path: str, body: object, repeat_safe: bool
) -> None:
    content = None if body is None else json.dumps(body).encode()
    own = "https://api.anthropic.com" if "messages" in path else "https://api.openai.com"
    for host in (own, "https://my.services.ai.azure.com", "http://127.0.0.1:8080"):
        request = Request("POST", host + path, [], content)
        assert dialect_for(request).profile(request).repeat_safe is repeat_safe
        request = Request("GET", host + path, [], b"")
        assert dialect_for(request).profile(request).repeat_safe


Fail = Callable[[], Outcome | None]


@pytest.mark.parametrize(
    ("fail", "ambiguous"),
    [
        (lambda: classify_exception(httpx.ConnectError("refused")), False),
        (lambda: classify_exception(httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]")), False),
        (lambda: classify_exception(httpx.ReadTimeout("")), True),
        (lambda: classify(502), True),
        (lambda: classify(504), True),
        (lambda: classify_exception(httpx2.RemoteProtocolError("peer closed connection")), True),
        (lambda: classify_exception(httpcore.ReadError()), True),
        (lambda: classify(429), False),
        (lambda: classify(503), False),
    ],
    ids=["a", "b", "c", "d 502", "d 504", "e closed", "e reset", "429", "503"],
)
def test_rty_06_what_may_have_been_carried_out_is_marked(fail: Fail, ambiguous: bool) -> None:
    outcome = fail()
    assert outcome is not None
    assert outcome.retryable
    assert outcome.ambiguous is ambiguous


class SoftTimeLimitExceeded(Exception):  # noqa: N818 - celery's
    """What a signal handler raises."""


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded(), ValueError("a hook's")], ids=repr)
def test_can_04_only_transport_errors_are_transport_errors(error: Exception) -> None:
    assert classify_exception(error) is None
