"""A request, written anew for the target it goes to: URL, credentials, the name of the model.

Everything else stays byte for byte: bodies are not parsed and written again, headers keep their order. Nothing of
one target's credentials, or of the caller's, ever goes to another. Which target it is must not be decided in here.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from resilient_llm.core.json_member import with_member
from resilient_llm.core.multipart import with_field
from resilient_llm.providers import dialect_for
from resilient_llm.routing.address import address_at, provider_of, query_at, unsuitable

if TYPE_CHECKING:
    from resilient_llm.message import Headers, Request
    from resilient_llm.target import Target

__all__ = ["keeps_model", "rewrite"]

_SECRETS = frozenset(
    {
        b"api-key",
        b"authentication",
        b"authorization",
        b"cookie",
        b"cookie2",
        b"ocp-apim-subscription-key",
        b"openai-organization",
        b"openai-project",
        b"proxy-authorization",
        b"x-amz-content-sha256",
        b"x-amz-date",
        b"x-api-key",
        b"x-goog-api-key",
        b"x-goog-user-project",
        b"x-key",
        b"x-token",
    }
)
# Gateways' own names for them: cf-aig-authorization, helicone-auth, x-litellm-api-key, x-amz-security-token ...
_SECRET_ENDINGS = (
    b"-access-key",
    b"-access-token",
    b"-api-key",
    b"-api-token",
    b"-auth",
    b"-auth-token",
    b"-authorization",
    b"-client-secret",
    b"-secret-key",
    b"-security-token",
    b"-session-token",
    b"-subscription-key",
    b"_api_key",
)
_BEARER_ONLY = frozenset({"aws.bedrock", "gcp.vertex_ai"})
_AZURE = frozenset({"azure.ai.inference", "azure.ai.openai"})
_MODEL = "model"
_USERINFO = re.compile(r"(?<=://)[^/@]*@")
_DIGESTS = frozenset({b"content-digest", b"content-md5", b"digest"})
_EACH_MODEL = re.compile(rb'((?<!\\)"model"[ \t\n\r]*:[ \t\n\r]*)"models/[^"\\]*"')


def rewrite(request: Request, target: Target, secret: str | None) -> Request:
    """Give the request as it goes to a target, with `secret` to open it; the same one when nothing changes.

    The URL is the target's, with the route that the caller's own ends in. Credentials of the caller (headers,
    cookies, keys in the query) stay behind when the request goes to another origin, and whenever there is a `secret`.
    The model is replaced where it stands: in the path, in the body's JSON, in a field of a multipart form. A body
    that can be read only once is left as it is (see `keeps_model`).

    Raises `NoTargetError`, with one word for why in `rejected`, for a request that cannot be written for the target:
    a route that it does not have, or a body whose model cannot be replaced.
    """
    plan = _plan(target)
    dialect = target.dialect or dialect_for(request).name
    url, mark, query = request.url.partition("?")
    versioned = "api-version=" in query
    model = target.model
    if model is None and (versioned or plan.versioned):
        model = _named(request)
    address = address_at(target, dialect, url, model, versioned=versioned)
    strip = secret is not None or not address.same_origin
    where = _USERINFO.sub("", address.url, 1) if strip and "@" in address.url else address.url
    if mark or plan.versioned:
        query = query.partition("#")[0]
        if strip or target.url is not None:
            query = query_at(query, strip=strip, api_version=target.api_version, versioned=address.versioned)
        where = f"{where}?{query}" if query else where
    body = None if target.model is None else _body(request, target, dialect)
    added = plan.own
    if secret is not None:
        added = [*added, _authentication(target.auth, plan.provider, dialect, secret)]
    size = None if body is None else len(body)
    headers = _headers(request, plan.host, added, strip=strip, size=size)
    if body is None and where == request.url and headers == request.headers:
        return request
    changed = request.replace(url=where, headers=headers, body=body)
    changed.buffer_upload = None  # it would make a request for where the caller sends it
    if body is not None and target.model is not None and _MODEL in request.json:
        changed._json = {**request.json, _MODEL: _called(request, target.model, dialect)}
    return changed


def keeps_model(request: Request, target: Target) -> bool:
    """Tell whether a request's body would ask a target for the model by the caller's name for it.

    So it is for an upload that can be read only once. `Retry` makes replayable what is not too large.
    """
    return target.model is not None and request.body is None


class _Plan(NamedTuple):
    """What is the same for all requests to a target."""

    provider: str | None
    host: bytes | None
    own: Headers
    versioned: bool


@lru_cache(maxsize=1024)
def _plan(target: Target) -> _Plan:
    host = None
    if target.url is not None:
        parts = urlsplit(target.url)
        default = {"http": ":80", "https": ":443"}[parts.scheme]
        host = parts.netloc.removesuffix(default).encode("ascii")
    own = [(name.lower().encode(), value.encode()) for name, value in target.headers.items()]
    return _Plan(provider_of(target), host, own, target.api_version is not None)


def _named(request: Request) -> str | None:
    named = request.json.get(_MODEL)
    return named if isinstance(named, str) else None


def _headers(
    request: Request, host: bytes | None, added: Headers, *, strip: bool, size: int | None
) -> Headers:
    """Give the headers with those `added` in place of the caller's of the same name."""
    replaced = [name for name, _ in added]
    headers = []
    for header in request.headers:
        name = header[0].lower()
        if name == b"host":
            headers.append(header if host is None else (header[0], host))
        elif name == b"content-length" and size is not None:
            headers.append((header[0], str(size).encode()))
        elif size is not None and name in _DIGESTS:
            continue  # of another body
        elif not (strip and _is_secret(name)) and name not in replaced:
            headers.append(header)
    headers += added
    return headers


@lru_cache(maxsize=1024)
def _is_secret(name: bytes) -> bool:
    """Tell whether a header (lower case) is one that credentials come in."""
    return name in _SECRETS or name.endswith(_SECRET_ENDINGS)


def _authentication(auth: str | None, provider: str | None, dialect: str, secret: str) -> tuple[bytes, bytes]:
    scheme = auth or _scheme(provider, dialect)
    if scheme.lower() == "bearer":
        return b"authorization", f"Bearer {secret}".encode()
    return scheme.lower().encode(), secret.encode()


def _scheme(provider: str | None, dialect: str) -> str:
    """Say how a provider wants a secret: in which header, or as a bearer of it."""
    if provider in _BEARER_ONLY:
        return "bearer"
    if dialect == "anthropic":
        return "x-api-key"
    if provider in _AZURE:
        return "api-key"
    return "x-goog-api-key" if dialect == "gemini" else "bearer"


def _body(request: Request, target: Target, dialect: str) -> bytes | None:
    """Give the body with the target's model in it; `None` when it stays as it is."""
    body, model = request.body, target.model
    if not body or model is None:
        return None
    encoding = request.header(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise unsuitable(target, "encoded_body", "the model in a compressed body cannot be replaced")
    try:
        if _MODEL in request.json:
            changed = with_member(body, _MODEL, _json(_called(request, model, dialect)))
        elif dialect == "gemini":  # each of a batch of embeddings names it again
            changed = _EACH_MODEL.sub(partial(_renamed, _json(f"models/{model}")), body)
        elif body.startswith(b"--"):
            content_type = request.header(b"content-type") or b""
            changed = with_field(body, content_type, _MODEL, model.encode())
        else:
            return None
    except ValueError as error:
        raise unsuitable(target, "body", f"the model in the body cannot be replaced: {error}") from None
    return None if changed == body else changed


def _called(request: Request, model: str, dialect: str) -> str:
    """Say how a body is to name the model: with Google's prefix where the caller writes that."""
    named = request.json[_MODEL]
    prefixed = dialect == "gemini" and isinstance(named, str) and named.startswith("models/")
    return f"models/{model}" if prefixed and "/" not in model else model


def _renamed(name: bytes, found: re.Match[bytes]) -> bytes:
    return found[1] + name


@lru_cache(maxsize=1024)
def _json(text: str) -> bytes:
    return json.dumps(text).encode()
