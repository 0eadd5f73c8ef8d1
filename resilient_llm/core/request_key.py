"""What tells one request from another: a key that two requests share only if they ask for the same.

In doubt they differ: a difference that does not matter costs a second request, one that does a wrong answer. Whether an
answer may be given twice at all is not decided in here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from hashlib import sha256
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

__all__ = ["IGNORED_FIELDS", "canonical_body", "owner_digest", "question_digest", "request_key"]

IGNORED_FIELDS = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
"""Members of a request's body that say who asks and for what purpose, and leave the answer as it is."""

_ECHOING = "/responses"
"""A route whose answers repeat those members: there none is passed over."""

# What is new in every request, belongs to the connection, or says who sends it and not what is asked.
_IGNORED_HEADERS = frozenset(
    {
        b"amz-sdk-invocation-id",
        b"amz-sdk-request",
        b"baggage",
        b"connection",
        b"content-digest",
        b"content-length",
        b"content-md5",
        b"date",
        b"digest",
        b"idempotency-key",
        b"keep-alive",
        b"priority",
        b"request-id",
        b"sentry-trace",
        b"te",
        b"traceparent",
        b"tracestate",
        b"transfer-encoding",
        b"uber-trace-id",
        b"user-agent",
        b"via",
        b"x-amz-content-sha256",
        b"x-amz-date",
        b"x-amzn-trace-id",
        b"x-client-request-id",
        b"x-cloud-trace-context",
        b"x-correlation-id",
        b"x-ms-client-request-id",
        b"x-request-id",
        b"x-request-timeout",
    }
)
_IGNORED_PREFIXES = (b"x-b3-", b"x-datadog-", b"x-stainless-")
_CREDENTIALS = frozenset(
    {
        b"api-key",
        b"authorization",
        b"cookie",
        b"ocp-apim-subscription-key",
        b"openai-organization",
        b"openai-project",
        b"proxy-authorization",
        b"x-api-key",
        b"x-goog-api-key",
        b"x-goog-user-project",
    }
)
_CREDENTIAL_ENDINGS = (b"-api-key", b"-auth", b"-auth-token", b"-authorization", b"-security-token")
_CREDENTIAL_PARAMETERS = frozenset({"access_token", "api-key", "api_key", "key"})
_SIGNED = b"AWS4-"

Headers = Iterable[tuple[bytes, bytes]]


def request_key(
    method: str,
    url: str,
    headers: Headers,
    body: bytes,
    *,
    tenant: str | None,
    share: bool = False,
    ignored_fields: Collection[str] = IGNORED_FIELDS,
    ignored_headers: Collection[bytes] = (),
) -> str:
    """Give a key of 64 hexadecimal digits for a request.

    It covers the tenant and the credentials, or with `share` neither; method and URL with its query; all headers
    but those that are new in every request, and `ignored_headers` (lower case); the body as `canonical_body` has it.
    """
    kept = [
        (name, value)
        for name, value in ((name.lower(), value.strip()) for name, value in headers)
        if name not in _IGNORED_HEADERS
        and name not in ignored_headers
        and not name.startswith(_IGNORED_PREFIXES)
        and not _is_credential(name)
    ]
    kept.sort(
        key=lambda header: header[0]
    )  # of one name the order stays: the first value may be the one that counts
    if urlsplit(url).path.endswith(_ECHOING):
        ignored_fields = ()
    return _digest(
        b"" if share else owner_digest(tenant, url, headers).encode(),
        method.encode(),
        (_without_credentials(url) if share else url).encode("utf-8", "surrogatepass"),
        _digest(*(part for header in kept for part in header)).encode(),
        canonical_body(body, ignored_fields),
    )


def owner_digest(tenant: str | None, url: str, headers: Headers, name: bytes = b"") -> str:
    """Give a digest that tells whose a request is: of which tenant, with which credentials, and what they `name` it."""
    credentials = sorted(
        (name.lower(), _lasting(value)) for name, value in headers if _is_credential(name.lower())
    )
    query = [
        part
        for part in parse_qsl(urlsplit(url).query, keep_blank_values=True)
        if part[0] in _CREDENTIAL_PARAMETERS
    ]
    return _digest(
        b"" if tenant is None else b"=" + tenant.encode("utf-8", "surrogatepass"),
        urlencode(query).encode(),
        name,
        *(part for credential in credentials for part in credential),
    )


def question_digest(method: str, url: str, body: bytes) -> bytes:
    """Give a digest of 32 bytes of what is asked, whoever asks; no member of the body is passed over."""
    parts = (method.encode(), url.encode("utf-8", "surrogatepass"), canonical_body(body, ()))
    return bytes.fromhex(_digest(*parts))


def canonical_body(body: bytes, ignored: Collection[str]) -> bytes:
    """Write a JSON object without blanks, its own members in order and without those `ignored`.

    The order of members further in stays: a model answers in the order in which a schema names them. A body that is no
    such object, or not read in the same way by everybody (a name twice, NaN), stays as it is.
    """
    try:
        parsed = json.loads(body, object_pairs_hook=_unique)
        if not isinstance(parsed, dict):
            return b"=" + body
        kept = {name: parsed[name] for name in sorted(parsed) if name not in ignored}
        return json.dumps(kept, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return b"=" + body


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return members


def _is_credential(name: bytes) -> bool:
    return name in _CREDENTIALS or name.endswith(_CREDENTIAL_ENDINGS)


def _lasting(value: bytes) -> bytes:
    """Give what of a credential is the same in every request: of a signature, whose it is."""
    if not value.startswith(_SIGNED):
        return value
    return value.partition(b"Credential=")[2].partition(b"/")[0]


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    if not any(f"{name}=" in parts.query for name in _CREDENTIAL_PARAMETERS):
        return url
    query = [
        part
        for part in parse_qsl(parts.query, keep_blank_values=True)
        if part[0] not in _CREDENTIAL_PARAMETERS
    ]
    return urlunsplit(parts._replace(query=urlencode(query)))


def _digest(*parts: bytes) -> str:
    """Hash parts so that no other parts make the same whole: each comes after its length."""
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.hexdigest()
