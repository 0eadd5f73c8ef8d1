"""The names providers give their errors, and what each means.

One table for all: the names differ between providers, and gateways relay each other's. A name is here when
it says more than its status does, or when it may stand in the body of a 200 and the status must be told
from it. Prose is looked at only where a provider has no name of its own for an important case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resilient_llm.providers.meaning import (
    CONTENT_FILTER,
    CONTEXT_LENGTH,
    CREDENTIAL,
    DENIED,
    FAULT,
    OVERLOADED,
    REFUSED,
    THROTTLED,
    Meaning,
)

__all__ = ["CODES", "DAILY_QUOTA", "Code", "Phrase", "find_code", "find_phrase"]


class Code(NamedTuple):
    """Say what one name means; without a `meaning`, what the reply's status means."""

    status: int
    """The status that is meant where the reply has none of its own: in a 200 or in a stream."""
    meaning: Meaning | None = None


class Phrase(NamedTuple):
    """Say what a wording means that only prose carries.

    One about the key must be how the message begins. Further in there may stand what a caller sent, a model's name
    for one, and nobody's words must take the key from the others.
    """

    text: str
    statuses: frozenset[int]
    meaning: Meaning
    error_type: str


DAILY_QUOTA = "daily_quota_exceeded"
"""Our name for Google's QuotaFailure that names a quota per day, which no short wait refills."""

_OPENAI = {
    # https://developers.openai.com/api/docs/guides/error-codes, and the SDK's ResponseError
    "insufficient_quota": Code(429, CREDENTIAL),
    "billing_not_active": Code(429, CREDENTIAL),
    "billing_hard_limit_reached": Code(429, CREDENTIAL),
    "credit_balance_exhausted": Code(429, CREDENTIAL),
    "organization_spend_limit_exceeded": Code(429, CREDENTIAL),
    "organization_usage_limit_exceeded": Code(429, CREDENTIAL),
    "project_spend_limit_exceeded": Code(429, CREDENTIAL),
    "account_deactivated": Code(401, CREDENTIAL),
    "invalid_api_key": Code(401, CREDENTIAL),
    "missing_scope": Code(403, DENIED),  # with a 401: the key may not do this
    "model_not_found": Code(404),  # with a 403: the project may not use it
    "context_length_exceeded": Code(400, CONTEXT_LENGTH),
    "content_filter": Code(400, CONTENT_FILTER),
    "content_policy_violation": Code(400, CONTENT_FILTER),
    "image_content_policy_violation": Code(400, CONTENT_FILTER),
    "misalignment_policy_violation": Code(400, CONTENT_FILTER),
    "moderation_blocked": Code(400, CONTENT_FILTER),
    "bio_policy": Code(400, CONTENT_FILTER),
    "invalid_prompt": Code(400),
    "invalid_request_error": Code(400),
    "rate_limit_exceeded": Code(429),
    "slow_down": Code(429),
    "server_error": Code(500),
    "vector_store_timeout": Code(504),
    "service_unavailable_error": Code(503),
    "server_is_overloaded": Code(503, OVERLOADED),
    "engine_overloaded_error": Code(503, OVERLOADED),  # Moonshot sends it with a 429
    # Azure
    "authenticationtypedisabled": Code(403, CREDENTIAL),
    "responsibleaipolicyviolation": Code(400, CONTENT_FILTER),
    # Groq
    "organization_restricted": Code(400, CREDENTIAL),
    # LiteLLM's proxy, with a 401 or a 403
    "key_model_access_denied": Code(403, DENIED),
    "org_model_access_denied": Code(403, DENIED),
    "project_model_access_denied": Code(403, DENIED),
    "team_model_access_denied": Code(403, DENIED),
    "user_model_access_denied": Code(403, DENIED),
    # llama.cpp, vLLM, TGI
    "exceed_context_size_error": Code(400, CONTEXT_LENGTH),
    "badrequesterror": Code(400),
    "internalservererror": Code(500),
    "overloaded": Code(529, OVERLOADED),
}

_OPENROUTER = {
    # https://openrouter.ai/docs/api/reference/errors-and-debugging
    "authentication": Code(401, CREDENTIAL),
    "payment_required": Code(402),
    "openrouter_in_flight_budget": Code(402, THROTTLED),  # frees itself as calls in flight end
    "refusal": Code(400, CONTENT_FILTER),
    "invalid_request": Code(400),
    "payload_too_large": Code(413),
    "unprocessable": Code(422),
    "provider_overloaded": Code(529, OVERLOADED),
    "provider_unavailable": Code(503),
    "server": Code(500),
    "timeout": Code(504),
}

_ANTHROPIC = {
    # https://platform.claude.com/docs/en/api/errors, and the SDK's table of error codes
    "overloaded_error": Code(529, OVERLOADED),
    "rate_limit_error": Code(429),
    "authentication_error": Code(401, CREDENTIAL),
    "billing_error": Code(402, CREDENTIAL),
    "permission_error": Code(403),
    "not_found_error": Code(404),
    "conflict_error": Code(409),
    "request_too_large": Code(413),
    "timeout_error": Code(504),
    "api_error": Code(500),
    "ramp_limit_exceeded": Code(429, THROTTLED),
    "contract_spend_limit_reached": Code(429, CREDENTIAL),
    "enforced_spend_limit_reached": Code(429, CREDENTIAL),
    "linked_organization_billing_unavailable": Code(402, CREDENTIAL),
    "linked_organization_spend_limit_reached": Code(402, CREDENTIAL),
    "organization_on_hold": Code(400, CREDENTIAL),
    "claude_code_key_creator_not_member": Code(400, CREDENTIAL),
    "cmek_key_disabled": Code(400, CREDENTIAL),  # nothing works with this key until its owner acts
}

_GOOGLE = {
    # google.rpc.Code, which the Interactions API writes in lower case; google.rpc.ErrorInfo's reasons
    DAILY_QUOTA: Code(429, CREDENTIAL),
    "quota_exceeded": Code(429, CREDENTIAL),
    "api_key_invalid": Code(400, CREDENTIAL),
    "billing_disabled": Code(403, CREDENTIAL),
    "consumer_suspended": Code(403, CREDENTIAL),
    "resource_exhausted": Code(429),  # also sent with a 402, when prepaid credit has run out
    "too_many_requests": Code(429),
    "invalid_argument": Code(400),
    "failed_precondition": Code(400),
    "out_of_range": Code(400),
    "unauthenticated": Code(401, CREDENTIAL),
    "permission_denied": Code(403),
    "not_found": Code(404),
    "aborted": Code(409),
    "already_exists": Code(409),
    "cancelled": Code(499),
    "unknown": Code(500),
    "internal": Code(500),
    "data_loss": Code(500),
    "unimplemented": Code(501),
    "unavailable": Code(503),
    "service_unavailable": Code(503),
    "deadline_exceeded": Code(504),
}

_BEDROCK = {
    # Amazon Bedrock user guide, "Troubleshooting API error codes"; API reference of the runtime
    "throttlingexception": Code(429, THROTTLED),
    "toomanyrequestsexception": Code(429, THROTTLED),
    "servicequotaexceededexception": Code(400, THROTTLED),  # "you can resubmit your request later"
    "modelnotreadyexception": Code(429, THROTTLED),
    "modeltimeoutexception": Code(408),
    "modelerrorexception": Code(424, FAULT),
    "modelstreamerrorexception": Code(424, FAULT),
    "internalserverexception": Code(500),
    "internalfailure": Code(500),
    "serviceunavailableexception": Code(503),
    "validationexception": Code(400),
    "resourcenotfoundexception": Code(404),
    "accessdeniedexception": Code(403),  # mostly to one model
    "expiredtokenexception": Code(403, CREDENTIAL),
    "incompletesignature": Code(400, DENIED),  # signatures are of one request
    "invalidclienttokenid": Code(403, CREDENTIAL),
    "invalidsignatureexception": Code(403, DENIED),
    "missingauthenticationtokenexception": Code(403, DENIED),  # said of unknown paths, too
    "notauthorized": Code(400, DENIED),
    "optinrequired": Code(403, CREDENTIAL),
    "requestexpired": Code(400, DENIED),
    "unrecognizedclientexception": Code(403, CREDENTIAL),
}

CODES: Mapping[str, Code] = {**_OPENAI, **_OPENROUTER, **_ANTHROPIC, **_GOOGLE, **_BEDROCK}

# Names under which a provider files whatever it has no name for.
_CATCH_ALL = frozenset(
    {
        "accessdeniedexception",
        "bad_request",
        "badrequest",
        "badrequesterror",
        "forbidden",
        "invalid_argument",
        "invalid_request",
        "invalid_request_error",
        "payment_required",
        "permission-denied",
        "permission_denied",
        "permission_error",
        "rate_limit_exceeded",
        "the caller does not have permission to execute the specified operation",  # xAI's `code`
        "tokens",
        "validation",
        "validation_error",
        "validationexception",
    }
)

_REJECTED = frozenset({400, 413, 422})
_UNPAID = frozenset({402})
_FORBIDDEN = frozenset({400, 401, 403})

_PHRASES: Sequence[Phrase] = (
    *(
        Phrase(text, _REJECTED, CONTEXT_LENGTH, "context_length_exceeded")
        for text in (
            "maximum context length",  # OpenAI's older models, vLLM, Mistral, DeepSeek
            "exceeds the context window",
            "prompt is too long",  # Anthropic
            "exceed context limit",  # Anthropic, prompt and max_tokens together
            "exceeds the maximum number of tokens",  # Gemini
            "input token count",  # Vertex AI
            "input is too long for requested model",  # Bedrock
            "too many tokens",  # Cohere
            "available context size",  # llama.cpp before it had a name
            "tokens + `max_new_tokens` must be",  # TGI
        )
    ),
    Phrase("your credit balance is too low", _REJECTED, CREDENTIAL, "billing_error"),  # Anthropic
    # Anthropic, usage limits that the account's owner has set
    Phrase("you have reached your specified", _REJECTED, CREDENTIAL, "billing_error"),
    *(
        Phrase(text, _FORBIDDEN, CREDENTIAL, "credential_refused")
        for text in (
            "this organization has been disabled",  # Anthropic
            "your api key was reported as leaked",  # Gemini
            "your project has been denied access",  # Gemini
            "authentication failed: please make sure your api key is valid",  # Bedrock
            "key limit exceeded",  # OpenRouter: what the key may spend in all
            "your newly created team",  # xAI: has no credits yet
        )
    ),
    *(
        # OpenRouter: not for that many tokens of that model, with what is left; others may be cheap enough.
        Phrase(text, _UNPAID, DENIED, "request_unaffordable")
        for text in ("fewer max_tokens", "token capacity required", "prompt tokens limit exceeded")
    ),
    # OpenAI, to keys that may not do everything: "Missing scopes: ..."
    Phrase("insufficient permissions for this operation", _FORBIDDEN, DENIED, "insufficient_permissions"),
    Phrase("content filtering policy", _REJECTED, CONTENT_FILTER, "content_filter"),  # Anthropic
    # OpenAI, Groq: more tokens than a whole minute allows, under the name of an ordinary rate limit.
    Phrase("request too large", frozenset({413, 429}), REFUSED, "request_too_large"),
)


def find_code(names: Sequence[str]) -> Code | None:
    """Give what the first name that decides a meaning by itself says, else the first that is known at all."""
    known = [code for name in names if (code := CODES.get(name.lower())) is not None]
    return next((code for code in known if code.meaning is not None), known[0] if known else None)


def find_phrase(names: Sequence[str], status: int, message: str | None) -> Phrase | None:
    """Give what the wording of an error means, where none of its names says anything in particular."""
    if not message or not all(name.lower() in _CATCH_ALL for name in names):
        return None
    text = message.lower()
    return next((phrase for phrase in _PHRASES if status in phrase.statuses and _says(text, phrase)), None)


def _says(text: str, phrase: Phrase) -> bool:
    return text.startswith(phrase.text) if phrase.meaning is CREDENTIAL else phrase.text in text
