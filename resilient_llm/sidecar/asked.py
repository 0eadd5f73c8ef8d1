"""What a request asks for, and whether whoever asks may.

Goes by the configuration alone: nothing is sent, and nothing of the body read, before it is clear who asks. Whether
there is room for the call is for the policies to say.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import anyio
from starlette.types import Scope

from resilient_llm._kept import LONGEST_MODEL
from resilient_llm.context import Ambient
from resilient_llm.core.json_member import with_member
from resilient_llm.message import DIGESTS, Request
from resilient_llm.policies.deadline import read_seconds
from resilient_llm.providers import dialect_for
from resilient_llm.routing.address import AT_TARGET
from resilient_llm.sidecar.auth import MIN_KEY, basic_pairs, keys_in
from resilient_llm.sidecar.browser import check_is_from_here
from resilient_llm.sidecar.disconnect import EMPTY_QUERY
from resilient_llm.sidecar.headers import for_provider
from resilient_llm.sidecar.inbound import safe_path, safe_query
from resilient_llm.sidecar.masked import Secrets
from resilient_llm.sidecar.refusal import RefusedError
from resilient_llm.transports.request_head import upload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient_llm.client import ClientDoor
    from resilient_llm.message import Headers
    from resilient_llm.sidecar.browser import Browser
    from resilient_llm.sidecar.build import Setup
    from resilient_llm.sidecar.inbound import ClientBody
    from resilient_llm.sidecar.tables import Tenant

__all__ = ["ROUTES", "Asked", "is_list"]

ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
    }
)
"""What goes through all policies, to a target that answers for the model."""

_MODELS = "/v1/models"
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_HOST = b"sidecar.invalid"
_MASK = b"***"
_ORIGIN = f"http://{_HOST.decode()}"
"""Where requests would go without a target: nowhere, so that none of them keeps the client's credentials."""
_JSON = re.compile(rb"json\b", re.IGNORECASE)
_KEPT = 1024 * 1024
"""Bytes of a body that are read before anything is sent, so that it may be sent again."""
_SEGMENT = re.compile(rb"%%2[Ff]|(?:(?!%%2[Ff])[^/]){%d,}" % MIN_KEY)
_NAMING = frozenset({"model", "models"})
_OF_THE_BYTES = DIGESTS | {b"content-length"}


class Asked:
    """Read a request under a configuration; each method raises `RefusedError` for what may not be.

    `first` has the first value of each of its headers.
    """

    def __init__(
        self, setup: Setup, scope: Scope, first: Mapping[bytes, bytes], browser: Browser | None
    ) -> None:
        self._setup = setup
        self._scope = scope
        self._headers: Headers = scope["headers"]
        self._first = first
        self._method: str = scope["method"]
        self._browser = browser
        self._keys = keys_in(self._headers)
        self._raw: bytes = scope.get("raw_path") or scope["path"].encode("latin-1", "replace")
        self._path: str = self._raw.decode("ascii", "replace")
        self.shown: str = self._path if self._path in ROUTES else self._without_keys()
        """The path, for the log."""
        self.tenant_name: str | None = None

    def path(self) -> str:
        """Give the path."""
        path = self._path
        if path not in ROUTES:
            path = safe_path(self._raw)
        if self._method not in _METHODS:
            raise _by("POST", "This method is not allowed here.")
        return path

    def tenant(self) -> Tenant | None:
        """Find out who asks; `None` where there are no tenants."""
        tenants = self._setup.config.tenants
        if not tenants:
            if self._browser is not None:
                self._browser.check()
            if not self._setup.config.server.open:
                check_is_from_here(self._first)
            return None
        name = self.tenant_name = self._setup.keys.tenant_of(self._keys)
        if name is None:
            raise RefusedError(
                401, "invalid_api_key", "No valid API key was given.", [(b"www-authenticate", b"Bearer")]
            )
        return tenants[name]

    def door(self, path: str, tenant: Tenant | None) -> tuple[ClientDoor, str | None]:
        """Give the door that leads to what is asked for, and the target where it is named."""
        if path in ROUTES:
            if self._method != "POST":
                raise _by("POST, OPTIONS", "Ask here by POST.")
            return self._setup.door, None
        if self.shown != self._path:
            raise RefusedError(400, "invalid_path", "The path of the request has an API key in it.")
        if is_list(path):
            return self._setup.door, None
        name = path[1:].partition("/")[0]
        door = self._setup.passthrough.get(name)
        if door is None or not (tenant is None or tenant.may_pass_through):
            raise RefusedError(404, "not_found", _nothing_at(path))
        return door, name

    def listed(self, tenant: Tenant | None) -> list[str] | None:
        """Give the models that are listed for whoever asks; `None` where that is the provider's to say."""
        if self._method not in ("GET", "HEAD"):
            raise _by("GET, HEAD, OPTIONS", "Ask here by GET.")
        names = self._setup.models
        if tenant is None or tenant.models is None:
            return names or None
        return [name for name in names or tenant.models if name in tenant.models]

    def is_upload(self) -> bool:
        """Tell whether the body is one to pass on as it comes: large, as files are, and nothing to be read here."""
        first = self._first
        if b"content-encoding" in first or _JSON.search(first.get(b"content-type") or b"json"):
            return False
        return b"transfer-encoding" in first or int(first.get(b"content-length", b"0")[:20]) > _KEPT

    def upload(self, path: str, body: ClientBody, target: str) -> Request:
        """Make the request that goes on with a body that is still to come."""
        length = self._first.get(b"content-length")
        url, headers = self._head(path, None if length is None else int(length), target)
        return upload(self._method, url, headers, body)

    def request(self, path: str, body: bytes, target: str | None) -> Request:
        """Make the request that goes on; what its path begins with is the target, where that is named."""
        sends_body = bool(body) or self._method in ("POST", "PUT", "PATCH")
        url, headers = self._head(path, len(body) if sends_body else None, target)
        return Request(self._method, url, headers, body)

    def _head(self, path: str, size: int | None, target: str | None) -> tuple[str, Headers]:
        """Give where a request goes on to, and with what headers, `size` being the length of its body."""
        query = safe_query(self._scope["query_string"])
        if len(query) >= MIN_KEY:
            query = self._without_keys_in(query)
        origin = _ORIGIN
        if target is not None:
            origin, path = AT_TARGET, path[len(target) + 1 :]
        headers = for_provider(self._headers, self._first, _HOST, size)
        if b"content-encoding" in self._first:  # it has been undone
            headers = [
                one
                for one in headers
                if one[0] == b"content-length" or one[0] not in _OF_THE_BYTES | {b"content-encoding"}
            ]
        together = b" ".join([value for _name, value in headers])  # hardly ever is there anything to find
        if not together.isascii() and not all(_is_utf8(value) for _name, value in headers):
            raise RefusedError(400, "invalid_header", "A header of the request is not UTF-8.")
        if self._may_be_told_among(together):
            headers = self._without_told(headers)
        asks = query or EMPTY_QUERY in (self._scope.get("extensions") or ())
        return f"{origin}{path}?{query}" if asks else f"{origin}{path}", headers

    def _may_be_told_among(self, values: bytes) -> bool:
        """Tell, soon, whether there may be a key in a header that goes on; `values` are those of all."""
        for key in self._keys:
            if len(key) >= MIN_KEY and (values.count(key) or key.lower() in self._first):
                return True
        return self._setup.secrets.may_be_in(values, least=MIN_KEY) or values.lower().count(b"basic ") > 0

    def _without_told(self, headers: Headers) -> Headers:
        """Give the headers without those that are called like a key, or tell one."""
        names = {key.lower() for key in self._shown_keys}
        if names.isdisjoint(self._first) and not self._tells(b" ".join([value for _name, value in headers])):
            return headers
        return [(name, value) for name, value in headers if name not in names and not self._tells(value)]

    def _tells(self, value: bytes) -> bool:
        """Tell whether a header's value has a key in it, as it is or behind the name of a user."""
        return self._has_own(value) or any(map(self._has_own, basic_pairs(value)))

    def _without_keys_in(self, query: str) -> str:
        """Give the query without what has a key in it, as a name or as a value, whatever it is called."""

        def has_key(part: str) -> bool:
            name, _, value = part.partition("=")
            written = {text for one in (part, name, value) for text in (one, one.replace("+", " "))}
            return any(self.has_key(unquote_to_bytes(one)) for one in written)

        return "&".join([part for part in query.split("&") if not has_key(part)])

    def model(self, request: Request) -> str:
        """Give the model that a body asks for."""
        # UTF-16 and UTF-32 are what parsers take and JSON does not allow.
        wide = b"\0" in (request.body or b"")[:4]
        model = None if wide else request.json.get("model")
        if not isinstance(model, str) or not model:
            why = "The body has to be a JSON object with a model, a string."
            raise RefusedError(400, "invalid_request_error", why)
        self._check_name(model)
        return model

    def has_key(self, text: bytes) -> bool:
        """Tell whether there is a key in a text: one that the request shows, a target's, or by itself a tenant's.

        Short ones are made up, for servers that ask for any key (`lm-studio`), and may well be in a name.
        """
        return self._has_own(text) or (len(text) >= MIN_KEY and self._setup.keys.has(text))

    def _has_own(self, text: bytes) -> bool:
        """Tell whether there is a key in a text that the request shows, or a target's."""
        return self._own.are_in(text) or self._setup.secrets.are_in(text, least=MIN_KEY)

    @cached_property
    def _shown_keys(self) -> list[bytes]:
        return [key for key in self._keys if len(key) >= MIN_KEY]

    @cached_property
    def _own(self) -> Secrets:
        return Secrets(self._shown_keys)

    def _without_keys(self) -> str:
        """Give the path with asterisks for keys that somebody has put there, whoever they belong to."""
        setup = self._setup
        path = self._own.masked(self._raw)
        path = _SEGMENT.sub(
            lambda found: _MASK if setup.keys.has(unquote_to_bytes(found[0])) else found[0], path
        )
        return setup.secrets.masked(path).decode("ascii", "replace")

    def check_name(self, request: Request) -> None:
        """Make sure that a request to a target by its name asks for no model whose own name is none."""
        self._check_name(dialect_for(request).profile(request).model or "")

    def _check_name(self, model: str) -> None:
        _check_name(model)
        if model not in self._setup.config.models and self.has_key(model.encode()):
            # A slip of the client's that would put the key into the log, and tell it to the provider.
            raise RefusedError(400, "invalid_request_error", "The model's name has an API key in it.")

    def check_model(self, request: Request, tenant: Tenant | None) -> None:
        """Make sure that the tenant may ask for the model, and that the body asks for no other."""
        if tenant is None or tenant.models is None:
            return
        model = self.model(request)
        named: dict[str, object] = {"model": model}
        others = request.json.get("models", [])
        if "models" in request.json:  # what OpenRouter is to go on to
            named["models"] = others
        if not isinstance(others, list) or not all(name in tenant.models for name in (model, *others)):
            raise RefusedError(404, "model_not_found", "This model does not exist, or is not for you.")
        if any(name not in named and name.casefold() in _NAMING for name in request.json):
            # Some parsers, as Go's, take these for the same, and the last of them.
            why = "The body names its model in a member that is not spelled model, or models."
            raise RefusedError(400, "invalid_request_error", why)
        # Of several members of this name a provider may take another than the one that was looked at.
        body = request.body or b""
        request.body = body
        for member, value in named.items():
            request.body = with_member(request.body, member, json.dumps(value).encode())
        if request.body != body:
            size = (b"content-length", str(len(request.body)).encode())
            request.headers = [*(one for one in request.headers if one[0] not in _OF_THE_BYTES), size]

    def ambient(self, tenant: Tenant | None) -> Ambient:
        """Say who the call is for, and until when the client wants it."""
        name = self.tenant_name
        found = _ambient(name, 0, None) if tenant is None else _ambient(name, tenant.priority, tenant.purpose)
        seconds = self._first.get(b"x-request-timeout")
        return found if seconds is None else replace(found, deadline=_deadline(seconds))


def is_list(path: str) -> bool:
    """Tell whether a path is that of the list of models, or of one of them."""
    return path == _MODELS or path.startswith(f"{_MODELS}/")


def _nothing_at(path: str) -> str:
    """Say that there is nothing at a path, and what may be wrong with the base URL that a client puts before it."""
    if f"/v1{path}" in ROUTES or is_list(f"/v1{path}"):
        return "There is nothing here: the base URL of this client has to end in /v1."
    if path.startswith("/v1/v1/"):
        return "There is nothing here: the base URL of this client must not end in /v1, which it adds itself."
    return "There is nothing here."


@lru_cache(maxsize=1024)
def _ambient(tenant: str | None, priority: int, purpose: str | None) -> Ambient:
    return Ambient(tenant=tenant, priority=priority, purpose=purpose)


def _deadline(asked: bytes) -> float:
    """Give the end of the seconds that the client allows, on `anyio.current_time()`'s clock."""
    seconds = read_seconds(asked)
    if seconds is None or not 0 < seconds < math.inf:
        raise RefusedError(400, "invalid_timeout", "x-request-timeout has to be seconds above 0.")
    return anyio.current_time() + seconds


def _check_name(model: str) -> None:
    """Make sure that a name can be logged, counted and shown, and the last of them kept."""
    if len(model) > LONGEST_MODEL:
        why = f"The model's name is longer than {LONGEST_MODEL} characters."
        raise RefusedError(400, "invalid_request_error", why)
    try:
        model.encode()
    except UnicodeEncodeError:  # JSON may have it; with one such name no metrics can be written any more
        why = "The model's name has half of a surrogate pair in it."
        raise RefusedError(400, "invalid_request_error", why) from None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _by(methods: str, message: str) -> RefusedError:
    return RefusedError(405, "method_not_allowed", message, [(b"allow", methods.encode())])
