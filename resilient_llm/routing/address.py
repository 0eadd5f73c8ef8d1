"""Where a request goes at a target: the target's base URL, and what the caller asks for there.

Callers have base URLs of their own, whatever is before the route; targets have theirs, and some name the model in
the path. Headers and bodies must not enter here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote, unquote_plus

from resilient_llm._kept import LONGEST_MODEL, LONGEST_URL
from resilient_llm.errors import NoTargetError
from resilient_llm.location import locate

if TYPE_CHECKING:
    from resilient_llm.target import Target

__all__ = ["Address", "address_at", "provider_of", "query_at", "unsuitable"]

_OPENAI_ROUTES = (
    "/chat/completions",
    "/images/generations",
    "/images/edits",
    "/images/variations",
    "/audio/speech",
    "/audio/transcriptions",
    "/audio/translations",
    "/responses/input_tokens",
    "/responses",
    "/completions",
    "/embeddings",
    "/moderations",
    "/rerank",
)
# Azure names the deployment in the path of these only; see `_deployments_endpoints` in openai's lib/azure.py.
_BY_DEPLOYMENT = frozenset(_OPENAI_ROUTES) - {
    "/responses",
    "/responses/input_tokens",
    "/moderations",
    "/rerank",
}
_AZURE = frozenset({"azure.ai.openai", "azure.ai.inference"})
_VERSION = re.compile(r".*/(v[0-9]+[a-z0-9]*)(?=/|$)")
_GOOGLE_MODEL = re.compile(r"(/publishers/\w+)?/(?:models|tunedModels|endpoints)/[^/:]+")
_CLAUDE_AT_VERTEX = "/publishers/anthropic/models/"

_SECRETS = frozenset(
    {
        "access_token",
        "api-key",
        "api_key",
        "apikey",
        "auth",
        "key",
        "sig",
        "signature",
        "subscription-key",
        "token",
    }
)
_SIGNATURES = ("x-amz-", "x-goog-signature", "x-goog-credential")


class Address(NamedTuple):
    """Hold where a request goes, but for its query, and whether that is where the caller would send it."""

    url: str
    same_origin: bool
    versioned: bool
    """Whether Azure's `api-version` belongs into the query."""


def unsuitable(target: Target, why: str, message: str) -> NoTargetError:
    """Make the error for a request that cannot be written for a target; `why` is a short, stable word."""
    return NoTargetError(
        f"target {target.name!r}: {message}", rejected=(f"{target.name}:{why}",), name=target.name
    )


def provider_of(target: Target) -> str | None:
    """Give who answers at a target: what it says, or who is known to at its host."""
    if target.provider is not None or target.url is None:
        return target.provider
    return locate(target.url).provider


def address_at(target: Target, dialect: str, url: str, model: str | None, *, versioned: bool) -> Address:
    """Say where a request to `url`, which is without its query, goes at a target.

    `model` is what it is to be asked for there, and `versioned` whether the caller gives an Azure `api-version`.
    Raises `NoTargetError` for a route that the target does not have.
    """
    short = len(url) <= LONGEST_URL and (model is None or len(model) <= LONGEST_MODEL)
    return (_kept if short else _address)(target, dialect, url, model, versioned)


def _address(
    target: Target,
    dialect: str,
    url: str,
    model: str | None,
    versioned: bool,  # noqa: FBT001 - a cache counts by position
) -> Address:
    origin, path = _split(url)
    if target.url is None:
        return Address(url, same_origin=True, versioned=True)
    if ".." in unquote(path).replace("\\", "/").split("/"):
        raise unsuitable(target, "path", "the path of the request leaves the API")
    own_origin, base = _split(target.url)
    versioned = target.api_version is not None or (versioned and not base.endswith("/v1"))
    try:
        place = _places.get(dialect, _anywhere)(target, base, _Asked(path, model, versioned))
    except LookupError as error:
        raise unsuitable(target, "route", str(error.args[0])) from None
    is_azure = provider_of(target) in _AZURE
    same = _normal(origin) == _normal(own_origin)
    return Address(f"{own_origin}{place}", same_origin=same, versioned=versioned and is_azure)


_kept = lru_cache(maxsize=4096)(_address)


def query_at(query: str, *, strip: bool, api_version: str | None, versioned: bool) -> str:
    """Give the caller's query with Azure's version as it should be, and with `strip` without secrets."""
    kept = [part for part in query.split("&") if part and _stays(part, strip=strip)]
    if not versioned or api_version is not None:
        kept = [part for part in kept if _name(part) != "api-version"]
    if api_version is not None:
        kept.append(f"api-version={quote(api_version, safe='')}")
    return "&".join(kept)


def _stays(part: str, *, strip: bool) -> bool:
    name = _name(part)
    return not strip or not (name in _SECRETS or name.startswith(_SIGNATURES))


def _name(part: str) -> str:
    return unquote_plus(part.partition("=")[0]).lower()


def _split(url: str) -> tuple[str, str]:
    """Take a URL apart after its origin."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority}", f"{slash}{path}".partition("#")[0].rstrip("/")


def _normal(origin: str) -> str:
    scheme, _, authority = origin.lower().partition("://")
    host = authority.rpartition("@")[2]
    return f"{scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ':'))}"


class _Asked(NamedTuple):
    path: str
    model: str | None
    versioned: bool


def _openai(target: Target, base: str, asked: _Asked) -> str:
    before, deployments, rest = asked.path.partition("/deployments/")
    deployment, _, after = rest.partition("/")
    route = next((ending for ending in _OPENAI_ROUTES if asked.path.endswith(ending)), None)
    if route is None:
        route = f"/{after}" if deployments else _without_azure(_after_version(before))
    if provider_of(target) not in _AZURE or "/deployments/" in base or base.endswith(("/v1", "/models")):
        return _join(base, route)
    base = f"{base.removesuffix('/openai')}/openai"
    if not asked.versioned:
        return f"{base}/v1{route}"
    if route not in _BY_DEPLOYMENT:
        return base + route
    model = asked.model or unquote(deployment)
    if not model:
        raise LookupError("Azure asks for a deployment: give the target a model")
    return f"{base}/deployments/{quote(model, safe='')}{route}"


def _anthropic(target: Target, base: str, asked: _Asked) -> str:
    at_vertex = _CLAUDE_AT_VERTEX in asked.path
    if at_vertex != (provider_of(target) == "gcp.vertex_ai"):
        raise LookupError("Vertex AI and Anthropic do not ask for Claude in the same way")
    if at_vertex:
        return _google(target, base, asked)
    start = asked.path.rfind("/v1/")
    return _join(base, asked.path[start:] if start >= 0 else asked.path)


def _google(target: Target, base: str, asked: _Asked) -> str:
    """Put the model into the path: models/{model}:{method}, or with its publisher at Vertex AI."""
    path, model = asked.path, asked.model
    found = _GOOGLE_MODEL.search(path)
    vertex = provider_of(target) == "gcp.vertex_ai"
    if not base:
        base = _google_base(path[: found.start()] if found else path, vertex=vertex)
    if found is None:
        return _join(base, _after_version(path))
    resource = found[0] if found[1] is None else found[0].removeprefix(found[1])
    if model is not None:
        resource = f"/{quote(model, safe='/')}" if "/" in model else f"/models/{quote(model, safe='')}"
    if vertex and resource.startswith("/models/"):
        resource = f"/publishers/{'anthropic' if _CLAUDE_AT_VERTEX in path else 'google'}{resource}"
    return base + resource + path[found.end() :]


def _google_base(before: str, *, vertex: bool) -> str:
    """Give what is before the model where the target's URL says nothing."""
    if vertex:
        if "/projects/" not in before:
            raise LookupError("the url of a target at Vertex AI needs its project and location")
        return before
    version = _VERSION.match(before)
    return "/v1beta" if version is None else f"/{version[1]}"


def _bedrock(_target: Target, base: str, asked: _Asked) -> str:
    _, found, rest = asked.path.partition("/model/")
    if not found:
        return _join(base, asked.path)
    named, _, action = rest.rpartition("/")
    return f"{base}/model/{named if asked.model is None else quote(asked.model, safe='')}/{action}"


def _anywhere(_target: Target, base: str, asked: _Asked) -> str:
    return _join(base, asked.path)


_places = {"anthropic": _anthropic, "bedrock": _bedrock, "gemini": _google, "openai": _openai}


def _without_azure(route: str) -> str:
    """Give what Azure's SDK asks for below its resource: /openai/models is /models."""
    return route.removeprefix("/openai") if route.startswith("/openai/") else route


def _after_version(path: str) -> str:
    version = _VERSION.match(path)
    return path if version is None else path[version.end() :]


def _join(base: str, route: str) -> str:
    """Put a route after a base; a version that both have stands there once."""
    version = re.match(r"/v[0-9]+[a-z0-9]*(?=/|$)", route)
    if version is not None and base.endswith(version[0]):
        route = route[version.end() :]
    return base + route
