"""A request, written anew for the target it goes to: URL, credentials, the name of the model.

Everything else stays byte for byte: bodies are not parsed and written again, headers keep their order. Nothing of
one target's credentials, or of the caller's, ever goes to another. Which target it is must not be decided in here.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache, partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from resilient_llm.core.json_member import with_member
from resilient_llm.core.multipart import with_field
from resilient_llm.providers import dialect_for
from resilient_llm.routing.address import address_at, provider_of, unsuitable
from resilient_llm.routing.header_rules import HeaderRules
from resilient_llm.routing.query import query_at

if TYPE_CHECKING:
    from resilient_llm.message import Headers, Request
    from resilient_llm.target import Target

__all__ = ["keeps_model", "rewrite"]

_BEARER_ONLY = frozenset({"aws.bedrock", "gcp.vertex_ai"})
_AZURE = frozenset({"azure.ai.inference", "azure.ai.openai"})
_MODEL = "model"
_USERINFO = re.compile(r"(?<=://)[^/@]*@")
_EACH_MODEL = re.compile(rb'((?<!\\)"model"[ \t\n\r]*:[ \t\n\r]*)"models/[^"\\]*"')


def rewrite(request: Request, target: Target, secret: str | None) -> Request:
    """Give the request as it goes to a target, with `secret` to open it; the same one when nothing changes.

    The URL is the target's, with what the caller asks for below its own base URL. Credentials of the caller (headers,
    cookies, keys in the query) stay behind when the request goes to another origin, and whenever there is a `secret`.
    The model is replaced where it stands: in the path, in the body's JSON, in a field of a multipart form. A body
    that can be read only once is left as it is (see `keeps_model`).

    Raises `NoTargetError`, with one word for why in `rejected`, for a request that cannot be written for the target:
    a route that it does not have, or a body whose model cannot be replaced.
    """
    dialect = target.dialect or dialect_for(request).name
    plan = _plan(target, dialect)
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
        empty = mark if not query else ""  # which some servers tell from none
        if strip or target.url is not None:
            query = query_at(query, address, strip=strip, api_version=target.api_version)
        where = f"{where}?{query}" if query else f"{where}{empty}"
    body = None if target.model is None else _body(request, target, dialect)
    kind = (strip, secret is not None, body is not None)
    rules = plan.rules.get(kind) or plan.add_rules(*kind)
    headers = rules.apply(request.headers, None if body is None else len(body))
    headers += plan.own
    if secret is not None:
        name, before = plan.opener
        headers.append((name, f"{before}{secret}".encode()))
    if body is None and where == request.url and headers == request.headers:
        return request
    changed = request.replace(url=where, headers=headers, body=body)
    changed.buffer_upload = None  # it would make a request for where the caller sends it
    if body is not None and target.model is not None:
        asked = request.json
        if _MODEL in asked:
            changed._json = {**asked, _MODEL: _called(asked[_MODEL], target.model, dialect)}
    return changed


def keeps_model(request: Request, target: Target) -> bool:
    """Tell whether a request's body would ask a target for the model by the caller's name for it.

    So it is for an upload that can be read only once. `Retry` makes replayable what is not too large.
    """
    return target.model is not None and request.body is None


class _Plan:
    """What is the same for all requests in one dialect to a target."""

    __slots__ = ("host", "opener", "own", "rules", "versioned")

    def __init__(
        self, host: bytes | None, own: Headers, opener: tuple[bytes, str], *, versioned: bool
    ) -> None:
        self.host = host
        self.own = own
        self.opener = opener
        self.versioned = versioned
        self.rules: dict[tuple[bool, bool, bool], HeaderRules] = {}
        """What becomes of headers, by whether they are stripped, there is a secret, and the body is another."""

    def add_rules(self, strip: bool, opened: bool, resized: bool) -> HeaderRules:  # noqa: FBT001 - as in `rules`
        replaced = [name for name, _ in self.own]
        if opened:
            replaced.append(self.opener[0])
        rules = HeaderRules(self.host, replaced, strip=strip, resized=resized)
        self.rules[strip, opened, resized] = rules
        return rules


@lru_cache(maxsize=1024)
def _plan(target: Target, dialect: str) -> _Plan:
    host = None
    if target.url is not None:
        parts = urlsplit(target.url)
        default = {"http": ":80", "https": ":443"}[parts.scheme]
        host = parts.netloc.removesuffix(default).encode("ascii")
    own = [(name.lower().encode(), value.encode()) for name, value in target.headers.items()]
    opener = _opener(target, provider_of(target), dialect)
    return _Plan(host, own, opener, versioned=target.api_version is not None)


def _named(request: Request) -> str | None:
    named = request.json.get(_MODEL)
    return named if isinstance(named, str) else None


def _opener(target: Target, provider: str | None, dialect: str) -> tuple[bytes, str]:
    """Give the header that a secret goes out in, and what stands before it there."""
    scheme = (target.auth or _scheme(provider, dialect)).lower()
    return (b"authorization", "Bearer ") if scheme == "bearer" else (scheme.encode(), "")


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
        asked = request.json
        if _MODEL in asked:
            changed = with_member(body, _MODEL, _json(_called(asked[_MODEL], model, dialect)))
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


def _called(named: object, model: str, dialect: str) -> str:
    """Say how a body is to name the model: with Google's prefix where the caller, who has `named` it, writes that."""
    prefixed = dialect == "gemini" and isinstance(named, str) and named.startswith("models/")
    return f"models/{model}" if prefixed and "/" not in model else model


def _renamed(name: bytes, found: re.Match[bytes]) -> bytes:
    return found[1] + name


@lru_cache(maxsize=1024)
def _json(text: str) -> bytes:
    return json.dumps(text).encode()
