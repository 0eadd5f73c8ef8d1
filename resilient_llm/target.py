"""One deployment that can answer: where it is, what it is called there, what opens it, and what it can do.

Values only. Which target an attempt goes to is `routing`'s to decide, and what becomes of a request on its way
there too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from resilient_llm._own_headers import check_auth, check_own
from resilient_llm.credentials import Credential
from resilient_llm.errors import ConfigurationError, NoTargetError
from resilient_llm.location import locate
from resilient_llm.ordering import Placement, check_order
from resilient_llm.pricing import Price, price_of

if TYPE_CHECKING:
    from resilient_llm.call import Policy

__all__ = ["CAPABILITIES", "DIALECTS", "Target"]

_PORTS = {"http": 80, "https": 443}
_IN_URLS = re.compile(r"[!-~]*")

DIALECTS = ("openai", "anthropic", "bedrock", "gemini")
"""What can be spoken at a target."""

CAPABILITIES = ("audio", "json_schema", "prefill", "streaming", "tools", "vision")
"""What a router looks for among a target's capabilities."""

_LAST_PORT = 65_535
_ALLOWED_URLS = "allowed are http and https URLs, such as https://host/v1"
_DIALECTS = {
    "anthropic": "anthropic",
    "azure.ai.openai": "openai",
    "deepseek": "openai",
    "gcp.gemini": "gemini",
    "groq": "openai",
    "mistral_ai": "openai",
    "openai": "openai",
    "openrouter": "openai",
    "perplexity": "openai",
    "x_ai": "openai",
}
"""What providers speak that speak one language only, or are asked in one unless told."""


class _Router:
    """Stands where a router would: a target's policies come after it."""

    placement = Placement.ROUTER
    name = "the router"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """One deployment that can answer.

    `url` is where requests go instead of where the caller sends them: what the provider's SDK calls `base_url`, such
    as `https://api.openai.com/v1`. `model` is what the provider calls the model. `None` leaves either as the caller
    has it. `provider` is a value of `gen_ai.provider.name`, by default what is known of the host, and `dialect` the
    API that is spoken there (openai, anthropic, gemini, bedrock); `None` is that of the provider, or any.

    `credential` is the key for it, or `credentials` several, shared among calls (see `CredentialPool`). They go out
    as the provider expects them, unless `auth` says how: "bearer", or the name of a header. `headers` are sent in
    place of the caller's of the same name, `host` too; what a connection or a body decides cannot be given. With
    `api_version` an Azure resource is asked at its deployments' paths with that version; without it with the caller's
    own, or at `/openai/v1` where the caller gives none.

    `weight` is its share among equals. `price` is looked up where it is left out and can be. `context_window` is in
    tokens, and `capabilities` are what it can do (`CAPABILITIES`); `None` is unknown
    for the first and everything for the second. `policies` are its own limits, circuit and clocks, outermost first.

    `name` is for telemetry, "provider/model" by default. `address` and `port` are those of the `url`. Raises
    `ConfigurationError` for options that cannot be.
    """

    name: str = ""
    address: str = ""
    port: int | None = None
    url: str | None = None
    provider: str | None = None
    dialect: str | None = None
    model: str | None = None
    credential: InitVar[Credential | None] = None
    credentials: Sequence[Credential] = ()
    auth: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_version: str | None = None
    weight: float = 1.0
    price: Price | None = None
    context_window: int | None = None
    capabilities: Collection[str] | None = None
    policies: Sequence[Policy] = ()

    def __post_init__(self, credential: Credential | None) -> None:
        self._check_place()
        self._check_words()
        if self.url is not None:
            address, port = _host_of(self.url)
            object.__setattr__(self, "url", self.url.rstrip("/"))
            object.__setattr__(self, "address", self.address or address)
            object.__setattr__(self, "port", self.port or port)
        if self.provider is None and self.url is not None:
            object.__setattr__(self, "provider", locate(self.url).provider)
        object.__setattr__(self, "name", self.name or self._called())
        if self.dialect is None and self.provider is not None:
            object.__setattr__(self, "dialect", self._usual_dialect())
        object.__setattr__(self, "credentials", self._given(credential))
        self._check_numbers()
        self._check_capabilities()
        self._check_headers()
        self._check_policies()

    def _check_place(self) -> None:
        for name in ("name", "address"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.isprintable():
                raise ConfigurationError(f"{name}={value!r}: allowed are printable strings")
        port = self.port
        if port is not None and (
            not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= _LAST_PORT
        ):
            raise ConfigurationError(
                f"port={port!r}: allowed are whole numbers from 1 to {_LAST_PORT}, and None"
            )

    def _check_words(self) -> None:
        for name in ("provider", "dialect", "model", "api_version"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
                raise ConfigurationError(
                    f"{name}={value!r}: allowed are printable strings, not empty, and None"
                )
        if self.dialect is not None and self.dialect not in DIALECTS:
            raise ConfigurationError(_unknown("dialect", self.dialect, DIALECTS))

    def _called(self) -> str:
        parts = (self.provider or self.address, self.model)
        name = "/".join(part for part in parts if part)
        if not name:
            raise ConfigurationError("a Target needs a name, or a url, provider or model to be called by")
        return name

    def _usual_dialect(self) -> str | None:
        if self.provider == "gcp.gemini" and self.url is not None and self.url.endswith("/openai"):
            return "openai"
        return _DIALECTS.get(self.provider or "")

    def _given(self, credential: Credential | None) -> tuple[Credential, ...]:
        if credential is not None and self.credentials:
            raise ConfigurationError(f"target {self.name!r}: credential= and credentials= exclude each other")
        if isinstance(self.credentials, Credential):
            raise ConfigurationError(f"target {self.name!r}: one credential is given as credential=")
        # Perhaps it is the secret itself, so it is not shown.
        if credential is not None and not isinstance(credential, Credential):
            raise ConfigurationError(
                f"target {self.name!r}: credential=... is of type {type(credential).__name__}; "
                "allowed are a Credential, and None"
            )
        given = (credential,) if credential is not None else _tuple_of(self.credentials)
        if given is None or not all(isinstance(one, Credential) for one in given):
            raise ConfigurationError(
                f"target {self.name!r}: credentials=... is of type {type(self.credentials).__name__}; "
                "allowed are lists of Credential"
            )
        return cast("tuple[Credential, ...]", given)

    def _check_numbers(self) -> None:
        weight, window = self.weight, self.context_window
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e12:
            raise ConfigurationError(f"weight={weight!r}: allowed are finite numbers above 0")
        if window is not None and (
            not isinstance(window, int) or isinstance(window, bool) or not 0 < window < 1e12
        ):
            raise ConfigurationError(f"context_window={window!r}: allowed are whole numbers from 1, and None")
        if self.price is not None and not isinstance(self.price, Price):
            raise ConfigurationError(f"price={self.price!r}: allowed are a Price, and None")

    def _check_capabilities(self) -> None:
        if self.capabilities is None:
            return
        given = _tuple_of(self.capabilities)
        if given is None or not all(isinstance(capability, str) for capability in given):
            known = ", ".join(map(repr, CAPABILITIES))
            raise ConfigurationError(
                f"capabilities={self.capabilities!r}: allowed are sets of {known}, and None"
            )
        for capability in map(str, given):
            if capability not in CAPABILITIES:
                raise ConfigurationError(_unknown("capabilities", capability, CAPABILITIES))
        object.__setattr__(self, "capabilities", frozenset(given))

    def _check_headers(self) -> None:
        if self.auth is not None:
            check_auth(self.auth)
        object.__setattr__(self, "headers", check_own(self.headers, self.auth))

    def _check_policies(self) -> None:
        given = _tuple_of(self.policies)
        if given is None:
            raise ConfigurationError(
                f"policies={self.policies!r}: allowed are lists of policies, outermost first"
            )
        for index, policy in enumerate(given):
            if not callable(policy) or isinstance(policy, type):
                raise ConfigurationError(
                    f"policies[{index}]={policy!r}: allowed are callable objects (call, call_next); "
                    "did you forget to create it?"
                )
        object.__setattr__(self, "policies", given)
        if not self.policies:
            return
        try:
            check_order([_Router(), *self.policies], "client")
        except ConfigurationError as error:
            raise ConfigurationError(f"target {self.name!r}: {error}") from None

    def check(self) -> None:
        """Raise `ConfigurationError`, which names the variable, when the environment lacks one of its credentials."""
        for credential in self.credentials:
            if credential.env is not None:
                try:
                    credential.secret()
                except ConfigurationError as error:
                    raise ConfigurationError(f"target {self.name!r}: {error}") from None

    def secret(self, index: int) -> str:
        """Give the secret of one of its credentials.

        Raises `NoTargetError`, which names the credential, when there is none now: nothing may be sent here, and
        there may be other targets.
        """
        try:
            return self.credentials[index].secret()
        except ConfigurationError as error:
            raise NoTargetError(
                f"target {self.name!r}: {error}", rejected=(f"{self.name}:no_credential",), name=self.name
            ) from error.__cause__

    def price_for(self, model: str | None = None) -> Price | None:
        """Give its price, or what is published for its model (or for `model`, where it leaves that to callers)."""
        return self.price or price_of(self.provider, self.model or model)


def _tuple_of(given: object) -> tuple[object, ...] | None:
    """Give what a list, a set or any such holds; `None` for what is none."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return None
    return tuple(given)


def _unknown(option: str, given: str, known: Sequence[str]) -> str:
    close = get_close_matches(given, known, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"{option}: {given!r} is unknown; known are {', '.join(map(repr, known))}{meant}"


def _host_of(url: object) -> tuple[str, int | None]:
    """Take a base URL apart; errors do not repeat what may be a secret in it."""
    if not isinstance(url, str):
        raise ConfigurationError(
            f"url=... is of type {type(url).__name__}; allowed are http and https URLs, and None"
        )
    try:
        parts = urlsplit(url)
    except ValueError:  # such as brackets without an address in them
        raise ConfigurationError(f"url=...: is none that can be read; {_ALLOWED_URLS}") from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ConfigurationError(
            f"url=...: has a port that is none; allowed are whole numbers from 1 to {_LAST_PORT}, or to leave it out"
        )
    if "://" not in url:
        raise ConfigurationError(f"url=...: has no scheme; {_ALLOWED_URLS}")
    shown = f"{parts.scheme}://{parts.hostname or ''}"
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigurationError(f"url={shown!r}: allowed are http and https URLs with a host")
    if "@" in parts.netloc:
        raise ConfigurationError(f"url={shown!r}: has credentials in it; they belong into a Credential")
    if "?" in url or "#" in url:
        raise ConfigurationError(
            f"url={shown!r}: has a query or a fragment; allowed is a base URL such as SDKs take"
        )
    if not _IN_URLS.fullmatch(url):
        raise ConfigurationError(f"url={shown!r}: has blanks or other characters that URLs do not have")
    return parts.hostname, port or _PORTS[parts.scheme]
