"""What the providers' own SDKs send is understood, and they understand what is written for them."""

import json
from collections.abc import Callable
from dataclasses import replace

import anthropic
import httpx2
import openai
import pytest

from resilient_llm.message import Request
from resilient_llm.outcome import Outcome
from resilient_llm.profile import Profile
from resilient_llm.providers import (
    ANTHROPIC,
    BEDROCK,
    DIALECTS,
    GEMINI,
    OPENAI,
    UNKNOWN,
    Dialect,
    dialect_for,
)

STATUSES = (400, 401, 402, 403, 404, 408, 409, 413, 422, 425, 429, 499, 500, 501, 502, 503, 504, 529)

OPENAI_ERRORS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    502: openai.InternalServerError,
    503: openai.InternalServerError,
    504: openai.InternalServerError,
}
ANTHROPIC_ERRORS = {
    400: (anthropic.BadRequestError, "invalid_request_error"),
    401: (anthropic.AuthenticationError, "authentication_error"),
    402: (anthropic.APIStatusError, "billing_error"),
    403: (anthropic.PermissionDeniedError, "permission_error"),
    404: (anthropic.NotFoundError, "not_found_error"),
    409: (anthropic.ConflictError, "conflict_error"),
    413: (anthropic.RequestTooLargeError, "request_too_large"),
    429: (anthropic.RateLimitError, "rate_limit_error"),
    500: (anthropic.InternalServerError, "api_error"),
    502: (anthropic.InternalServerError, "api_error"),
    503: (anthropic.InternalServerError, "api_error"),
    504: (anthropic.DeadlineExceededError, "timeout_error"),
    529: (anthropic.InternalServerError, "overloaded_error"),
}


class Provider(httpx2.BaseTransport):
    """Answers everything with one reply, and keeps the request."""

    def __init__(self, status: int = 400, body: bytes = b"{}") -> None:
        self.status = status
        self.body = body
        self.requests: list[httpx2.Request] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        self.requests.append(request)
        headers = {"content-type": "application/json", "x-should-retry": "false"}
        return httpx2.Response(self.status, headers=headers, content=self.body)

    def client(self) -> httpx2.Client:
        return httpx2.Client(transport=self)


def openai_client(provider: Provider) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="sk-fake", base_url="http://provider.example/v1", http_client=provider.client()
    )


def anthropic_client(provider: Provider) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        api_key="sk-fake", base_url="http://provider.example", http_client=provider.client()
    )


@pytest.mark.parametrize("status", OPENAI_ERRORS)
@pytest.mark.parametrize("dialect", [OPENAI, UNKNOWN], ids=lambda dialect: dialect.name)
def test_the_openai_sdk_raises_its_own_error(dialect: Dialect, status: int) -> None:
    provider = Provider(status, dialect.error_body(status, "the circuit is open", code="circuit_open"))
    with pytest.raises(openai.APIStatusError) as caught:
        openai_client(provider).chat.completions.create(model="m", messages=[])
    assert type(caught.value) is OPENAI_ERRORS[status]
    assert caught.value.code == "circuit_open"
    assert caught.value.type
    assert caught.value.param is None
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == "the circuit is open"
    assert len(provider.requests) == 1


@pytest.mark.parametrize("status", ANTHROPIC_ERRORS)
@pytest.mark.parametrize("code", [None, "circuit_open"])
def test_the_anthropic_sdk_raises_its_own_error(status: int, code: str | None) -> None:
    provider = Provider(status, ANTHROPIC.error_body(status, "the circuit is open", code=code))
    with pytest.raises(anthropic.APIStatusError) as caught:
        anthropic_client(provider).messages.create(model="m", max_tokens=1, messages=[])
    kind, error_type = ANTHROPIC_ERRORS[status]
    assert isinstance(caught.value, kind)
    assert caught.value.type == error_type
    assert caught.value.error_code == code
    assert caught.value.api_message == "the circuit is open"
    assert len(provider.requests) == 1


def test_googles_and_amazons_errors_have_their_shapes() -> None:
    assert json.loads(GEMINI.error_body(503, "m", code="circuit_open")) == {
        "error": {
            "code": 503,
            "message": "m",
            "status": "UNAVAILABLE",
            "details": [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "circuit_open"}],
        }
    }
    assert json.loads(GEMINI.error_body(418, "m")) == {
        "error": {"code": 418, "message": "m", "status": "FAILED_PRECONDITION"}
    }
    assert json.loads(BEDROCK.error_body(429, "m")) == {"message": "m", "__type": "ThrottlingException"}
    assert json.loads(BEDROCK.error_body(500, "m")) == {"message": "m", "__type": "InternalServerException"}
    assert json.loads(BEDROCK.error_body(418, "m")) == {"message": "m", "__type": "ValidationException"}
    assert json.loads(BEDROCK.error_body(503, "m", code="circuit_open"))["__type"] == "circuit_open"


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("dialect", [*DIALECTS, UNKNOWN], ids=lambda dialect: dialect.name)
def test_what_is_written_is_read_back_as_its_status(dialect: Dialect, status: int) -> None:
    plain = dialect.classify(status, [], None)
    for code in (None, "circuit_open"):
        outcome = dialect.classify(status, [], dialect.error_body(status, "Ω \ud800 refused", code=code))
        assert meaning(outcome) == meaning(plain)
        assert code is None or outcome.error_type == code


def meaning(outcome: Outcome) -> tuple[object, ...]:
    return outcome.verdict, outcome.scope, outcome.retryable, outcome.status


Send = Callable[[Provider], object]


def azure(provider: Provider) -> openai.AzureOpenAI:
    return openai.AzureOpenAI(
        api_key="fake",
        api_version="2024-10-21",
        azure_endpoint="https://my.openai.azure.com",
        http_client=provider.client(),
    )


SENT: list[tuple[str, Send, Dialect, Profile]] = [
    (
        "chat",
        lambda p: openai_client(p).chat.completions.create(model="m", messages=[], stream=True),
        OPENAI,
        Profile(
            provider="openai", operation="chat", model="m", stream=True, idempotency_header=b"idempotency-key"
        ),
    ),
    (
        "responses",
        lambda p: openai_client(p).responses.create(model="m", input="p"),
        OPENAI,
        Profile(provider="openai", operation="chat", model="m", idempotency_header=b"idempotency-key"),
    ),
    (
        "embeddings",
        lambda p: openai_client(p).embeddings.create(model="m", input="p"),
        OPENAI,
        Profile(provider="openai", operation="embeddings", model="m", idempotency_header=b"idempotency-key"),
    ),
    (
        "transcription",
        lambda p: openai_client(p).audio.transcriptions.create(model="m", file=b"wave"),
        OPENAI,
        Profile(
            provider="openai",
            operation="transcription",
            repeat_safe=False,
            idempotency_header=b"idempotency-key",
        ),
    ),
    (
        "azure chat",
        lambda p: azure(p).chat.completions.create(model="m", messages=[]),
        OPENAI,
        Profile(provider="azure.ai.openai", operation="chat", model="m"),
    ),
    (
        "azure files",
        lambda p: azure(p).files.create(file=b"x", purpose="batch"),
        OPENAI,
        Profile(provider="azure.ai.openai", repeat_safe=False),
    ),
    (
        "messages",
        lambda p: anthropic_client(p).messages.create(model="m", max_tokens=1, messages=[], stream=True),
        ANTHROPIC,
        Profile(provider="anthropic", operation="chat", model="m", stream=True),
    ),
    (
        "beta messages",
        lambda p: anthropic_client(p).beta.messages.create(model="m", max_tokens=1, messages=[]),
        ANTHROPIC,
        Profile(provider="anthropic", operation="chat", model="m"),
    ),
    (
        "count tokens",
        lambda p: anthropic_client(p).messages.count_tokens(model="m", messages=[]),
        ANTHROPIC,
        Profile(provider="anthropic", operation="count_tokens", model="m"),
    ),
    (
        "message batches",
        lambda p: anthropic_client(p).messages.batches.create(requests=[]),
        ANTHROPIC,
        Profile(provider="anthropic", repeat_safe=False),
    ),
    (
        "files, known by their header",
        lambda p: anthropic_client(p).beta.files.list(),
        ANTHROPIC,
        Profile(provider="anthropic"),
    ),
]


@pytest.mark.parametrize(
    ("send", "dialect", "profile"), [entry[1:] for entry in SENT], ids=[entry[0] for entry in SENT]
)
def test_what_an_sdk_sends_is_understood(send: Send, dialect: Dialect, profile: Profile) -> None:
    provider = Provider()
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        send(provider)
    native = provider.requests[0]
    request = Request(native.method, str(native.url), list(native.headers.raw), native.content)
    assert dialect_for(request) is dialect
    assert replace(dialect.profile(request), resumable=False) == profile
