"""What replies mean: a table of bodies as providers send them, row by row of docs/design.md, section 5."""

import json
from dataclasses import dataclass

import pytest

from resilient_llm.outcome import Scope, Verdict
from resilient_llm.providers import ANTHROPIC, BEDROCK, DIALECTS, GEMINI, OPENAI, UNKNOWN, Dialect
from resilient_llm.providers.base import _is_name
from resilient_llm.providers.codes import _PHRASES, CODES, Phrase
from resilient_llm.providers.meaning import CREDENTIAL as KEY

HeaderList = list[tuple[bytes, bytes]]

FAILURE = (Verdict.FAILURE, Scope.TARGET, True)
OVERLOADED = (Verdict.FAILURE, Scope.UPSTREAM, True)
THROTTLED = (Verdict.THROTTLED, Scope.TARGET, True)
CREDENTIAL = (Verdict.FATAL, Scope.CREDENTIAL, False)
CONTEXT = (Verdict.FATAL, Scope.TARGET, False)
DENIED = (Verdict.FATAL, Scope.TARGET, False)
REQUEST = (Verdict.FATAL, Scope.REQUEST, False)

Row = tuple[Verdict, Scope, bool]


@dataclass(frozen=True)
class Example:
    dialect: Dialect
    status: int
    body: object
    row: Row
    error_type: str
    ambiguous: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __str__(self) -> str:
        return f"{self.dialect.name}-{self.status}-{self.error_type}"


def openai_error(message: str, kind: str | None, code: str | None = None, param: str | None = None) -> object:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(kind: str, message: str = "m", error_code: str | None = None) -> object:
    error: dict[str, object] = {"type": kind, "message": message}
    if error_code is not None:
        error["details"] = {"error_code": error_code}
    return {"type": "error", "error": error, "request_id": "req_011CSHoEeqs5C35K2UUqR7Fy"}


def google_error(code: int, status: str, message: str = "m", details: list[object] | None = None) -> object:
    error: dict[str, object] = {"code": code, "message": message, "status": status}
    if details is not None:
        error["details"] = details
    return {"error": error}


def quota_failure(quota_id: str) -> object:
    violation = {
        "quotaMetric": "generate_content_free_tier_requests",
        "quotaId": quota_id,
        "quotaValue": "20",
    }
    return {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [violation]}


def reason(name: str) -> object:
    return {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": name, "domain": "googleapis.com"}


def retry_info(delay: str) -> object:
    return {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}


TPM = "on tokens per min (TPM): Limit 30000,"
CONTEXT_4K = (
    "This model's maximum context length is 4097 tokens. However, your messages resulted in 7575 tokens."
)

EXAMPLES = [
    # OpenAI
    Example(OPENAI, 500, openai_error("The server had an error", "server_error"), FAILURE, "server_error"),
    Example(OPENAI, 503, openai_error("The engine is overloaded", "server_error"), FAILURE, "server_error"),
    Example(
        OPENAI,
        503,
        openai_error("busy", "service_unavailable_error", "server_is_overloaded"),
        OVERLOADED,
        "server_is_overloaded",
    ),
    Example(
        OPENAI,
        429,
        openai_error(
            f"Rate limit reached for gpt-4o {TPM} Used 29000, Requested 4000.",
            "tokens",
            "rate_limit_exceeded",
        ),
        THROTTLED,
        "rate_limit_exceeded",
    ),
    Example(OPENAI, 429, openai_error("slower", "rate_limit_error", "slow_down"), THROTTLED, "slow_down"),
    Example(
        OPENAI,
        429,
        openai_error(f"Request too large for gpt-4o {TPM} Requested 36278.", "tokens", "rate_limit_exceeded"),
        REQUEST,
        "request_too_large",
    ),
    Example(
        OPENAI,
        429,
        openai_error("You exceeded your current quota", "insufficient_quota", "insufficient_quota"),
        CREDENTIAL,
        "insufficient_quota",
    ),
    Example(
        OPENAI,
        429,
        openai_error("You exceeded your current quota", "insufficient_quota"),
        CREDENTIAL,
        "insufficient_quota",
    ),
    Example(
        OPENAI,
        429,
        openai_error("spent", "insufficient_quota", "project_spend_limit_exceeded"),
        CREDENTIAL,
        "project_spend_limit_exceeded",
    ),
    Example(
        OPENAI,
        429,
        openai_error("Your account is not active", "billing_not_active", "billing_not_active"),
        CREDENTIAL,
        "billing_not_active",
    ),
    Example(
        OPENAI,
        401,
        openai_error("Incorrect API key provided", "invalid_request_error", "invalid_api_key"),
        CREDENTIAL,
        "invalid_api_key",
    ),
    Example(
        OPENAI,
        403,
        openai_error("Country not supported", "request_forbidden", "unsupported_country_region_territory"),
        DENIED,
        "unsupported_country_region_territory",
    ),
    Example(
        OPENAI,
        400,
        openai_error(CONTEXT_4K, "invalid_request_error", "context_length_exceeded", "messages"),
        CONTEXT,
        "context_length_exceeded",
    ),
    Example(
        OPENAI,
        400,
        openai_error(CONTEXT_4K, "invalid_request_error"),
        CONTEXT,
        "context_length_exceeded",
    ),
    Example(
        OPENAI,
        400,
        openai_error("Your request was rejected", "image_generation_user_error", "moderation_blocked"),
        REQUEST,
        "content_filter",
    ),
    # A name of its own says what is wrong: its prose is not searched.
    Example(
        OPENAI,
        400,
        openai_error(
            "max_tokens is above the maximum context length", "invalid_request_error", "unsupported_value"
        ),
        REQUEST,
        "unsupported_value",
    ),
    # The key may not do this: a model, a route. What it is good for is nobody's loss.
    Example(
        OPENAI,
        403,
        openai_error(
            "Project `p` does not have access to model `m`", "invalid_request_error", "model_not_found"
        ),
        DENIED,
        "model_not_found",
    ),
    Example(
        OPENAI,
        401,
        openai_error("You have insufficient permissions for this operation.", "invalid_request_error"),
        DENIED,
        "insufficient_permissions",
    ),
    Example(
        OPENAI, 401, openai_error("m", "invalid_request_error", "missing_scope"), DENIED, "missing_scope"
    ),
    Example(
        OPENAI,
        401,
        openai_error("key not allowed to access model", "key_model_access_denied", "401", "model"),
        DENIED,
        "key_model_access_denied",
    ),
    Example(
        OPENAI,
        403,
        openai_error("The model is blocked", "permissions_error", "model_permission_blocked_project"),
        DENIED,
        "model_permission_blocked_project",
    ),
    Example(
        OPENAI,
        403,
        {
            "code": "The caller does not have permission to execute the specified operation",
            "error": "Your newly created team doesn't have any credits yet.",
        },
        CREDENTIAL,
        "credential_refused",
    ),
    Example(
        OPENAI,
        404,
        openai_error("The model does not exist", "invalid_request_error", "model_not_found"),
        REQUEST,
        "model_not_found",
    ),
    # Azure
    Example(
        OPENAI,
        400,
        {
            "error": {
                "message": "The response was filtered",
                "type": None,
                "param": "prompt",
                "code": "content_filter",
                "status": 400,
                "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": {}},
            }
        },
        REQUEST,
        "content_filter",
    ),
    Example(
        OPENAI,
        429,
        {"error": {"code": "429", "message": "Please retry after 86400 seconds."}},
        THROTTLED,
        "429",
    ),
    Example(
        OPENAI, 401, {"statusCode": 401, "message": "Access denied due to invalid key"}, CREDENTIAL, "401"
    ),
    Example(
        OPENAI, 404, {"error": {"code": "DeploymentNotFound", "message": "no"}}, REQUEST, "DeploymentNotFound"
    ),
    # OpenRouter
    Example(OPENAI, 402, {"error": {"code": 402, "message": "Insufficient credits"}}, CREDENTIAL, "402"),
    Example(
        OPENAI,
        403,
        {"error": {"code": 403, "message": "Key limit exceeded (total limit). Manage it elsewhere"}},
        CREDENTIAL,
        "credential_refused",
    ),
    Example(
        OPENAI,
        402,
        {
            "error": {
                "code": 402,
                "message": "This request requires more credits, or fewer max_tokens. You can only afford 9",
                "metadata": {"error_type": "payment_required"},
            }
        },
        DENIED,
        "request_unaffordable",
    ),
    Example(
        OPENAI,
        402,
        {"error": {"code": 402, "message": "m", "metadata": {"limit_source": "openrouter_in_flight_budget"}}},
        THROTTLED,
        "openrouter_in_flight_budget",
    ),
    Example(
        OPENAI,
        403,
        {
            "error": {
                "code": 403,
                "message": "flagged",
                "metadata": {"reasons": ["x"], "flagged_input": "..."},
            }
        },
        REQUEST,
        "content_filter",
    ),
    Example(
        OPENAI,
        503,
        {"error": {"code": 503, "message": "m", "metadata": {"error_type": "provider_overloaded"}}},
        OVERLOADED,
        "provider_overloaded",
    ),
    # Moonshot, Groq, Mistral, vLLM, llama.cpp, TGI, FastAPI
    Example(
        OPENAI,
        429,
        {"error": {"type": "engine_overloaded_error", "message": "The engine is currently overloaded"}},
        OVERLOADED,
        "engine_overloaded_error",
    ),
    Example(
        OPENAI,
        413,
        openai_error("Request too large for model `x` (TPM): Limit 6000", "tokens", "rate_limit_exceeded"),
        REQUEST,
        "request_too_large",
    ),
    Example(
        OPENAI,
        400,
        {
            "object": "error",
            "message": CONTEXT_4K,
            "type": "invalid_request_error",
            "code": "3051",
            "param": None,
        },
        CONTEXT,
        "context_length_exceeded",
    ),
    Example(
        OPENAI,
        400,
        {"error": {"code": 400, "message": "too big", "type": "exceed_context_size_error", "n_ctx": 4096}},
        CONTEXT,
        "context_length_exceeded",
    ),
    Example(
        OPENAI, 429, {"error": "Model is overloaded", "error_type": "overloaded"}, OVERLOADED, "overloaded"
    ),
    Example(
        OPENAI,
        422,
        {"detail": [{"loc": ["body"], "msg": "field required", "type": "missing"}]},
        REQUEST,
        "422",
    ),
    # Anthropic
    Example(
        ANTHROPIC, 529, anthropic_error("overloaded_error", "Overloaded"), OVERLOADED, "overloaded_error"
    ),
    Example(ANTHROPIC, 500, anthropic_error("api_error"), FAILURE, "api_error"),
    Example(ANTHROPIC, 504, anthropic_error("timeout_error"), FAILURE, "timeout_error", ambiguous=True),
    Example(ANTHROPIC, 409, anthropic_error("conflict_error"), FAILURE, "conflict_error"),
    Example(ANTHROPIC, 429, anthropic_error("rate_limit_error"), THROTTLED, "rate_limit_error"),
    Example(
        ANTHROPIC,
        429,
        anthropic_error("rate_limit_error", error_code="ramp_limit_exceeded"),
        THROTTLED,
        "ramp_limit_exceeded",
    ),
    Example(
        ANTHROPIC,
        429,
        anthropic_error("rate_limit_error", error_code="enforced_spend_limit_reached"),
        CREDENTIAL,
        "enforced_spend_limit_reached",
    ),
    Example(ANTHROPIC, 401, anthropic_error("authentication_error"), CREDENTIAL, "authentication_error"),
    Example(ANTHROPIC, 402, anthropic_error("billing_error"), CREDENTIAL, "billing_error"),
    Example(ANTHROPIC, 403, anthropic_error("permission_error"), DENIED, "permission_error"),
    Example(
        ANTHROPIC,
        400,
        anthropic_error("invalid_request_error", "This organization has been disabled."),
        CREDENTIAL,
        "credential_refused",
    ),
    Example(
        ANTHROPIC,
        400,
        anthropic_error(
            "invalid_request_error", "Your credit balance is too low to access the Anthropic API."
        ),
        CREDENTIAL,
        "billing_error",
    ),
    Example(
        ANTHROPIC,
        400,
        anthropic_error("invalid_request_error", "You have reached your specified API usage limits."),
        CREDENTIAL,
        "billing_error",
    ),
    Example(
        ANTHROPIC,
        400,
        anthropic_error("invalid_request_error", error_code="organization_on_hold"),
        CREDENTIAL,
        "organization_on_hold",
    ),
    Example(
        ANTHROPIC,
        400,
        anthropic_error("invalid_request_error", "prompt is too long: 345320 tokens > 199999 maximum"),
        CONTEXT,
        "context_length_exceeded",
    ),
    Example(
        ANTHROPIC,
        400,
        anthropic_error(
            "invalid_request_error", "input length and `max_tokens` exceed context limit: 1 + 2 > 2"
        ),
        CONTEXT,
        "context_length_exceeded",
    ),
    Example(
        ANTHROPIC,
        400,
        anthropic_error("invalid_request_error", "Output blocked by content filtering policy"),
        REQUEST,
        "content_filter",
    ),
    Example(
        ANTHROPIC,
        400,
        anthropic_error("invalid_request_error", "max_tokens: Field required"),
        REQUEST,
        "invalid_request_error",
    ),
    Example(ANTHROPIC, 413, anthropic_error("request_too_large"), REQUEST, "request_too_large"),
    # Gemini and Vertex AI
    Example(
        GEMINI, 503, google_error(503, "UNAVAILABLE", "The model is overloaded."), FAILURE, "UNAVAILABLE"
    ),
    Example(
        GEMINI, 504, google_error(504, "DEADLINE_EXCEEDED"), FAILURE, "DEADLINE_EXCEEDED", ambiguous=True
    ),
    Example(GEMINI, 429, google_error(429, "RESOURCE_EXHAUSTED"), THROTTLED, "RESOURCE_EXHAUSTED"),
    Example(
        GEMINI,
        429,
        google_error(
            429, "RESOURCE_EXHAUSTED", details=[quota_failure("GenerateRequestsPerMinutePerProject")]
        ),
        THROTTLED,
        "RESOURCE_EXHAUSTED",
    ),
    Example(
        GEMINI,
        429,
        google_error(
            429, "RESOURCE_EXHAUSTED", details=[quota_failure("GenerateRequestsPerDayPerProject-FreeTier")]
        ),
        CREDENTIAL,
        "daily_quota_exceeded",
    ),
    Example(GEMINI, 402, google_error(402, "RESOURCE_EXHAUSTED"), CREDENTIAL, "RESOURCE_EXHAUSTED"),
    Example(
        GEMINI,
        400,
        google_error(400, "INVALID_ARGUMENT", "API key not valid.", [reason("API_KEY_INVALID")]),
        CREDENTIAL,
        "API_KEY_INVALID",
    ),
    Example(GEMINI, 403, google_error(403, "PERMISSION_DENIED"), DENIED, "PERMISSION_DENIED"),
    Example(
        GEMINI,
        403,
        google_error(403, "PERMISSION_DENIED", "You do not have permission to access the File abc."),
        DENIED,
        "PERMISSION_DENIED",
    ),
    Example(
        GEMINI,
        403,
        google_error(403, "PERMISSION_DENIED", "Consumer suspended", [reason("CONSUMER_SUSPENDED")]),
        CREDENTIAL,
        "CONSUMER_SUSPENDED",
    ),
    Example(
        GEMINI,
        403,
        google_error(403, "PERMISSION_DENIED", "Your API key was reported as leaked. Please use another."),
        CREDENTIAL,
        "credential_refused",
    ),
    Example(
        GEMINI,
        400,
        google_error(
            400,
            "INVALID_ARGUMENT",
            "The input token count (314175) exceeds the maximum number of tokens allowed.",
        ),
        CONTEXT,
        "context_length_exceeded",
    ),
    Example(GEMINI, 400, google_error(400, "INVALID_ARGUMENT", "bad"), REQUEST, "INVALID_ARGUMENT"),
    Example(GEMINI, 429, {"error": {"code": "quota_exceeded", "message": "m"}}, CREDENTIAL, "quota_exceeded"),
    # Gemini behind its OpenAI-compatible route: the same, in a list.
    Example(OPENAI, 429, [google_error(429, "RESOURCE_EXHAUSTED")], THROTTLED, "RESOURCE_EXHAUSTED"),
    # Bedrock
    Example(
        BEDROCK,
        429,
        {"message": "Too many tokens, please wait before trying again."},
        THROTTLED,
        "ThrottlingException",
        headers=(
            (
                b"x-amzn-ErrorType",
                b"ThrottlingException:http://internal.amazon.com/coral/com.amazon.bedrock/",
            ),
        ),
    ),
    Example(
        BEDROCK,
        400,
        {"__type": "com.amazon.coral.availability#ThrottlingException", "message": "Rate exceeded"},
        THROTTLED,
        "ThrottlingException",
    ),
    Example(
        BEDROCK,
        400,
        {"message": "m"},
        THROTTLED,
        "ServiceQuotaExceededException",
        headers=((b"x-amzn-errortype", b"ServiceQuotaExceededException"),),
    ),
    Example(
        BEDROCK,
        408,
        {"message": "m"},
        FAILURE,
        "ModelTimeoutException",
        ambiguous=True,
        headers=((b"x-amzn-errortype", b"ModelTimeoutException"),),
    ),
    Example(BEDROCK, 424, {"__type": "ModelErrorException"}, FAILURE, "ModelErrorException"),
    Example(BEDROCK, 500, {"__type": "InternalServerException"}, FAILURE, "InternalServerException"),
    Example(BEDROCK, 403, {"__type": "AccessDeniedException"}, DENIED, "AccessDeniedException"),
    Example(
        BEDROCK, 403, {"__type": "UnrecognizedClientException"}, CREDENTIAL, "UnrecognizedClientException"
    ),
    Example(
        BEDROCK,
        403,
        {"Message": "Authentication failed: Please make sure your API Key is valid."},
        CREDENTIAL,
        "credential_refused",
    ),
    Example(BEDROCK, 400, {"__type": "IncompleteSignature"}, DENIED, "IncompleteSignature"),
    Example(
        BEDROCK,
        400,
        {"message": "Input is too long for requested model."},
        CONTEXT,
        "context_length_exceeded",
        headers=((b"x-amzn-errortype", b"ValidationException"),),
    ),
    Example(
        BEDROCK,
        400,
        {"message": "Malformed input request"},
        REQUEST,
        "ValidationException",
        headers=((b"x-amzn-errortype", b"ValidationException"),),
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_providers_error_means(example: Example) -> None:
    body = json.dumps(example.body).encode()
    outcome = example.dialect.classify(example.status, list(example.headers), body)
    assert (outcome.verdict, outcome.scope, outcome.retryable) == example.row
    assert outcome.error_type == example.error_type
    assert outcome.status == example.status
    assert outcome.ambiguous is example.ambiguous
    assert outcome.retry_after is None


BY_STATUS = [
    *(
        (status, FAILURE)
        for status in (408, 409, 425, 500, 502, 503, 504, 507, 520, 521, 522, 523, 524, 525, 530)
    ),
    (529, OVERLOADED),
    (429, THROTTLED),
    *((status, CREDENTIAL) for status in (401, 402)),
    (403, DENIED),
    *((status, REQUEST) for status in (400, 404, 405, 406, 410, 413, 415, 418, 422, 424, 451, 499, 501, 505)),
]
AMBIGUOUS = {408, 502, 504, 520, 522, 524}


@pytest.mark.parametrize(("status", "row"), BY_STATUS)
@pytest.mark.parametrize("dialect", [*DIALECTS, UNKNOWN], ids=lambda dialect: dialect.name)
def test_without_a_name_the_status_decides(dialect: Dialect, status: int, row: Row) -> None:
    for body in (None, b"", b"<html>502 Bad Gateway</html>", b"{", b"null", b"[]"):
        outcome = dialect.classify(status, [], body)
        assert (outcome.verdict, outcome.scope, outcome.retryable) == row
        assert outcome.error_type == str(status)
        assert outcome.ambiguous is (status in AMBIGUOUS)


@pytest.mark.parametrize(
    ("body", "status", "row", "error_type"),
    [
        # STR-01 and STR-02: the data of an event of a stream
        (anthropic_error("overloaded_error"), 529, OVERLOADED, "overloaded_error"),
        (anthropic_error("rate_limit_error"), 429, THROTTLED, "rate_limit_error"),
        (anthropic_error("api_error"), 500, FAILURE, "api_error"),
        (anthropic_error("invalid_request_error"), 400, REQUEST, "invalid_request_error"),
        (
            {"type": "error", "code": "server_error", "message": "boom", "param": None},
            500,
            FAILURE,
            "server_error",
        ),
        (
            {
                "type": "response.failed",
                "response": {"status": "failed", "error": {"code": "rate_limit_exceeded"}},
            },
            429,
            THROTTLED,
            "rate_limit_exceeded",
        ),
        # The body of a reply
        (
            {"object": "response", "status": "failed", "error": {"code": "server_error"}},
            500,
            FAILURE,
            "server_error",
        ),
        ({"object": "error", "message": CONTEXT_4K}, 400, CONTEXT, "context_length_exceeded"),
        ({"error": "boom"}, 500, FAILURE, "500"),
        ({"error": {"message": "m", "code": 200}}, 500, FAILURE, "500"),
        (
            {"error": {"message": "m", "code": "insufficient_quota"}, "choices": []},
            429,
            CREDENTIAL,
            "insufficient_quota",
        ),
        (
            {"error": {"code": "server_error"}, "choices": [{"delta": {}, "finish_reason": "error"}]},
            500,
            FAILURE,
            "server_error",
        ),
        ([google_error(503, "UNAVAILABLE")], 503, FAILURE, "UNAVAILABLE"),
    ],
)
def test_an_error_in_a_200_counts_as_the_status_it_names(
    body: object, status: int, row: Row, error_type: str
) -> None:
    outcome = OPENAI.classify(200, [], json.dumps(body).encode())
    assert (outcome.verdict, outcome.scope, outcome.retryable) == row
    assert (outcome.status, outcome.error_type) == (status, error_type)


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        b'not json, though it says "error"',
        b'{"object": "response", "status": "completed", "error": null, "output": []}',
        b'{"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}], "error": {"code": 1}}',
        b'{"choices": [{"finish_reason": "error"}, {"finish_reason": "stop"}]}',
        b'{"message": "error", "detail": "error", "code": "error"}',
        b'["error"]',
        b'"error"',
    ],
    ids=repr,
)
def test_an_answer_is_a_success(body: bytes | None) -> None:
    assert OPENAI.classify(200, [(b"retry-after", b"5")], body).ok
    assert OPENAI.classify(304, [(b"x-should-retry", b"true")], body).ok


@pytest.mark.parametrize(
    ("status", "headers", "body", "retry_after", "source"),
    [
        (503, [(b"retry-after", b"3")], {}, 3.0, "retry-after"),
        (429, [(b"retry-after-ms", b"250"), (b"retry-after", b"1")], {}, 0.25, "retry-after-ms"),
        (429, [(b"retry-after", b"Mon, 01 Jan 2035 00:00:30 GMT")], {}, 30.0, "retry-after"),
        (429, [], google_error(429, "RESOURCE_EXHAUSTED", details=[retry_info("45.5s")]), 45.5, "body"),
        (529, [(b"retry-after", b"7")], anthropic_error("overloaded_error"), 7.0, "retry-after"),
        (401, [(b"retry-after", b"60")], {}, 60.0, "retry-after"),  # how long the credential is of no use
        (200, [(b"retry-after", b"9")], {"error": {"code": 429}}, 9.0, "retry-after"),
        (400, [(b"retry-after", b"9")], {}, None, None),  # nothing to come back for
    ],
)
def test_hints_are_kept_where_coming_back_can_help(
    status: int, headers: HeaderList, body: object, retry_after: float | None, source: str | None
) -> None:
    wall_now = 2_051_222_400.0  # 2035-01-01T00:00:00Z
    outcome = OPENAI.classify(status, headers, json.dumps(body).encode(), wall_now=wall_now)
    assert (outcome.retry_after, outcome.retry_after_source) == (retry_after, source)


def test_a_date_without_a_clock_beside_it_is_read_by_the_systems_clock() -> None:
    outcome = OPENAI.classify(503, [(b"retry-after", b"Wed, 21 Oct 2015 07:28:00 GMT")], b"")
    assert outcome.retry_after == 0.0
    outcome = OPENAI.classify(503, [(b"retry-after", b"Wed, 21 Oct 9015 07:28:00 GMT")], b"")
    assert outcome.retry_after is not None
    assert outcome.retry_after > 1e9


NO_NAMES = [
    "req_011CSHoEeqs5C35K2UUqR7Fy",
    "a" * 49,
    "two words",
    "café",
    "-x",
    "x.",
    "123",
    "a\nb",
    "",
    # Keys, as a provider might repeat them.
    "sk-provider-SECRET-aaaaaaaaaaaaaaaa",
    "sk-ant-api03-abcdefghijklmnopqrst",
    "gsk_abcdefghijklmnopqrstuvwxyz",
    "AIzaSyabcdefghijklmnopqrstuvwxyz",
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOP",
    "Qx7vBnLwpRtYgHsKd",
    "keyQzVbNwPrTyGsKd",
    "AKIAIOSFODNNEXAMPLE",
    "error_1234",
    "e1r2r3o4r",
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_does_not_reach_telemetry(name: str) -> None:
    for status, error in (
        (400, openai_error("m", None, name)),
        (400, openai_error("m", name, None)),
        (500, {"type": "error", "error": {"type": name, "message": name}}),
        (500, {"__type": name, "message": name}),
    ):
        outcome = OPENAI.classify(status, [(b"x-amzn-errortype", name.encode())], json.dumps(error).encode())
        assert outcome.error_type == str(status)


@pytest.mark.parametrize(
    "name",
    [
        "model_not_active",
        "unsupported_parameter",
        "string_above_max_length",
        "invalid_base64_image",
        "invalid_image_url",
        "tool_use_failed",
        "json_validate_failed",
        "max_tokens_exceeded",
        "bulkhead_full",  # of another sidecar
        "NotFoundError",
        "DeploymentNotFound",
        "ContextWindowExceededError",
        "RESOURCE_PROJECT_INVALID",
        "SERVICE_DISABLED",
        "DependencyFailedException",
    ],
)
def test_names_made_of_words_are_told_though_nobody_knows_them(name: str) -> None:
    assert name.lower() not in CODES
    assert OPENAI.classify(409, [], json.dumps(openai_error("m", None, name)).encode()).error_type == name


def test_every_name_that_means_something_is_one() -> None:
    assert [name for name in CODES if not _is_name(name) or not _is_name(name.upper())] == []


def test_names_are_known_in_any_case() -> None:
    for name in ("RESOURCE_EXHAUSTED", "resource_exhausted"):
        assert OPENAI.classify(200, [], json.dumps({"error": {"code": name}}).encode()).status == 429
    event = {"error": {"code": "throttlingException"}}
    assert BEDROCK.classify(200, [], json.dumps(event).encode()).verdict is Verdict.THROTTLED


@pytest.mark.parametrize("phrase", [phrase for phrase in _PHRASES if phrase.meaning is KEY])
def test_no_callers_words_take_the_key_from_others(phrase: Phrase) -> None:
    """Providers repeat what they were sent, the name of a model for one, in what they say is wrong with it."""
    for status in phrase.statuses:
        for message, wanted in ((phrase.text, True), (f"no such model: `{phrase.text}`", False)):
            body = json.dumps(openai_error(message, "permission_error")).encode()
            assert OPENAI.classify(status, [], body).dead_credential is (wanted or status == 401)
