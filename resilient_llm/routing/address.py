"""Where a request goes at a target: the target's base URL, and what the caller asks for there.

Callers have base URLs of their own, targets have theirs, and some name the model in the path. What is asked below
`AT_TARGET` is asked of the target itself, and joined to its URL as it is. Headers and bodies must not enter here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from resilient_llm._kept import LONGEST_MODEL, LONGEST_URL
from resilient_llm.errors import NoTargetError
from resilient_llm.location import locate
from resilient_llm.routing.query import AMBIGUOUS, CREDENTIALS, GOOGLES

if TYPE_CHECKING:
    from resilient_llm.target import Target

__all__ = ["AT_TARGET", "Address", "address_at", "provider_of", "unsuitable"]

AT_TARGET = "http://target.invalid"
"""The origin in the URL of a request whose path is one below the target's own URL, and none of a caller's API.

Nothing is there (RFC 6761, 6.4).
"""

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
_GOOGLE = frozenset({"gcp.gemini", "gcp.vertex_ai"})
_AZURE = frozenset({"azure.ai.openai", "azure.ai.inference"})
_VERSION = re.compile(r".*?/(v[0-9]+[a-z0-9]*)(?=/|$)")
_ROOT = r"v[0-9]+[a-z0-9]*|openai"
"""What the base URL of an OpenAI SDK ends in."""
_KNOWN = re.compile(rf"(?:.*/(?:{_ROOT}|deployments/([^/]+)))?({'|'.join(map(re.escape, _OPENAI_ROUTES))})/?")
_UNKNOWN = re.compile(rf".*?(?:/openai/deployments/([^/]+)|(?:/(?:{_ROOT})(?=/|$))+)(/.*|$)")
_AZURE_ROOT = re.compile(r"/openai(?:/v1)?$")
_AZURE_MODEL = re.compile(r"((?:/openai)?/deployments/)[^/]+")
_BEDROCK_MODEL = re.compile(r"(/model/).+(?=/)")
_GOOGLE_MODEL = re.compile(r"(/publishers/\w+)?/(?:models|tunedModels|endpoints)/[^/:]+")
_GOOGLE_FILES = re.compile(r".*?(/(?:upload|download)/v[0-9]+[a-z0-9]*/.*)")
_CLAUDE_AT_VERTEX = "/publishers/anthropic/models/"


class Address(NamedTuple):
    """Hold where a request goes, but for its query, and whether that is where the caller would send it."""

    url: str
    same_origin: bool
    versioned: bool
    """Whether Azure's `api-version` belongs into the query."""
    secrets: frozenset[str] = CREDENTIALS | GOOGLES
    """What a credential of the caller's is called in the query."""
    as_asked: bool = False
    """Whether the caller has asked the target itself, and so has the last word on the version."""


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
    if origin == AT_TARGET:
        return _as_asked(target, dialect, own_origin, base, path)
    versioned = target.api_version is not None or (versioned and not base.endswith("/v1"))
    try:
        place = _places.get(dialect, _anywhere)(target, base, _Asked(path, model, versioned))
    except LookupError as error:
        raise unsuitable(target, "route", str(error.args[0])) from None
    is_azure = provider_of(target) in _AZURE
    same = _normal(origin) == _normal(own_origin)
    secrets = CREDENTIALS | GOOGLES if same else CREDENTIALS | GOOGLES | AMBIGUOUS
    return Address(f"{own_origin}{place}", same, versioned and is_azure, secrets)


_kept = lru_cache(maxsize=4096)(_address)


def _split(url: str) -> tuple[str, str]:
    """Take a URL apart after its origin."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority}", f"{slash}{path}".partition("#")[0]


def _normal(origin: str) -> str:
    scheme, _, authority = origin.lower().partition("://")
    host = authority.rpartition("@")[2]
    return f"{scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ':'))}"


def _as_asked(target: Target, dialect: str, origin: str, base: str, path: str) -> Address:
    """Put a path below a target's URL: what both have there stands there once, and nothing is left out."""
    provider = provider_of(target)
    if target.model is not None:
        path = _with_model(path, dialect, provider, target.model)
    is_googles = dialect == "gemini" or provider in _GOOGLE
    if provider in _AZURE and path.startswith("/openai/"):  # from the resource on, as Azure's SDK asks
        base = _AZURE_ROOT.sub("", base)
    elif provider == "azure.ai.openai" and dialect == "openai" and not base:
        base = "/openai"
    elif is_googles and path.startswith(("/upload/", "/download/")):
        base = _before_version(base)
    place = _join(base, path)
    # Azure's newer API has no versions in the query.
    versioned = base.endswith("/v1") or not place.startswith("/openai/v1/")
    secrets = CREDENTIALS | GOOGLES if is_googles else CREDENTIALS
    return Address(f"{origin}{place}", same_origin=False, versioned=versioned, secrets=secrets, as_asked=True)


def _with_model(path: str, dialect: str, provider: str | None, model: str) -> str:
    """Put another model into a path that names one."""
    if dialect == "gemini" or _CLAUDE_AT_VERTEX in path:
        found = _GOOGLE_MODEL.search(path)
        if found is None:
            return path
        publisher = "" if "/" in model else found[1] or ""
        return f"{path[: found.start()]}{publisher}{_google_resource(model)}{path[found.end() :]}"
    if dialect == "bedrock" or provider in _AZURE:
        names_it = _BEDROCK_MODEL if dialect == "bedrock" else _AZURE_MODEL
        found = names_it.match(path)
        if found is not None:
            return f"{found[1]}{quote(model, safe='')}{path[found.end() :]}"
    return path


class _Asked(NamedTuple):
    path: str
    model: str | None
    versioned: bool


def _openai(target: Target, base: str, asked: _Asked) -> str:
    route, deployment = _route(asked.path, base)
    if provider_of(target) not in _AZURE or "/deployments/" in base or base.endswith(("/v1", "/models")):
        return _join(base, route)
    base = f"{base.removesuffix('/openai')}/openai"
    if not asked.versioned:
        return f"{base}/v1{route}"
    if route not in _BY_DEPLOYMENT and (deployment is None or route in _OPENAI_ROUTES):
        return base + route
    model = asked.model or unquote(deployment or "")
    if not model:
        raise LookupError("Azure asks for a deployment: give the target a model")
    return f"{base}/deployments/{quote(model, safe='')}{route}"


def _route(path: str, base: str) -> tuple[str, str | None]:
    """Tell what is asked for below the API's root, and Azure's deployment where the path has one.

    How long the caller's base URL is nobody says. It ends in a version, in `/openai` or in a deployment: where the
    whole rest is a route that is known, or else at the first of these, since ids behind it may look like one. A path
    that has none, and does not begin as the target's own URL does, is all route: to leave out what is not understood
    would be to ask for something else.
    """
    found = _KNOWN.fullmatch(path) or _UNKNOWN.fullmatch(path)
    if found is not None:
        return found[2], found[1]
    return (path.removeprefix(base) if path.startswith(f"{base}/") else path), None


def _anthropic(target: Target, base: str, asked: _Asked) -> str:
    at_vertex = _CLAUDE_AT_VERTEX in asked.path
    if at_vertex != (provider_of(target) == "gcp.vertex_ai"):
        raise LookupError("Vertex AI and Anthropic do not ask for Claude in the same way")
    if at_vertex:
        return _google(target, base, asked)
    start = asked.path.rfind("/v1/messages")
    if start < 0:
        start = asked.path.find("/v1/")
    return _join(base, asked.path[start:] if start >= 0 else asked.path)


def _google(target: Target, base: str, asked: _Asked) -> str:
    """Put the model into the path: models/{model}:{method}, or with its publisher at Vertex AI."""
    path, model = asked.path, asked.model
    found = _GOOGLE_MODEL.search(path)
    vertex = provider_of(target) == "gcp.vertex_ai"
    if not base:
        base = _google_base(path[: found.start()] if found else path, vertex=vertex)
    if found is None:
        files = _GOOGLE_FILES.fullmatch(path)
        return _join(base, _after_version(path)) if files is None else _before_version(base) + files[1]
    resource = found[0].removeprefix(found[1] or "") if model is None else _google_resource(model)
    if vertex and resource.startswith("/models/"):
        resource = f"/publishers/{'anthropic' if _CLAUDE_AT_VERTEX in path else 'google'}{resource}"
    return base + resource + path[found.end() :]


def _google_resource(model: str) -> str:
    return f"/{quote(model, safe='/')}" if "/" in model else f"/models/{quote(model, safe='')}"


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


def _after_version(path: str) -> str:
    version = _VERSION.match(path)
    return path if version is None else path[version.end() :]


def _before_version(base: str) -> str:
    before, _, last = base.rpartition("/")
    return before if _VERSION.fullmatch(f"/{last}") else base


def _join(base: str, route: str) -> str:
    """Put a route after a base; a version that both have, and what is before it, stands there once."""
    start = base.find("/")
    while start >= 0:
        end = base[start:]
        if f"{route}/".startswith(f"{end}/") and _VERSION.match(end) is not None:
            return base[:start] + route
        start = base.find("/", start + 1)
    return base + route
