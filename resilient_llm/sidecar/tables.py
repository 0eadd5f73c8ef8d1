"""The tables of a configuration: where a sidecar listens, who may call, what answers.

Types, and what is right or wrong within one table. What must fit together is checked by `fit`; the tables that are
options of one policy are in `options`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, field_validator, model_validator

from resilient_llm.policies._shares import HEAVIEST, LIGHTEST
from resilient_llm.presets import PRESETS
from resilient_llm.sidecar import formats
from resilient_llm.sidecar.options import (
    Amount,
    Caps,
    CircuitOptions,
    ConcurrencyOptions,
    Count,
    Listed,
    QuotaOptions,
    Ratio,
    Seconds,
    Section,
    TenantBulkhead,
    TimeoutOptions,
)

__all__ = [
    "TLS",
    "Admin",
    "Model",
    "ModelTarget",
    "PriceOptions",
    "Server",
    "Shared",
    "Store",
    "TargetOptions",
    "Telemetry",
    "Tenant",
    "VirtualModel",
]

Shared: TypeAlias = Literal["quotas", "budgets", "bulkheads", "circuits", "cache"]

_HASH = re.compile(r"[0-9a-f]{64}")
_OF_NOTHING = frozenset(hashlib.sha256(nothing).hexdigest() for nothing in (b"", b"\n", b"\r\n"))
"""What comes of hashing a variable that is not set."""
_PRESET_NAMES = tuple(PRESETS)
_BEYOND = 10**12
"""What weights and windows of targets stay below."""

Host: TypeAlias = Annotated[str, AfterValidator(formats.host)]
Weight: TypeAlias = Annotated[FiniteFloat, Field(gt=0, lt=_BEYOND)]
Window: TypeAlias = Annotated[int, Field(ge=1, lt=_BEYOND)]


class TLS(Section):
    """What clients of a listener are shown that come by https; files are named as seen from the configuration's own."""

    certificate: str
    """A file in PEM: the listener's certificate, then those it was made by."""
    key: str
    key_password_env: str | None = None
    client_ca: str | None = None
    """A file in PEM: who signs certificates of clients, without which nobody can connect then."""

    @field_validator("key_password_env")
    @classmethod
    def _is_variable(cls, name: str | None) -> str | None:
        return None if name is None else formats.variables([name])[0]


class Server(Section):
    """Where the sidecar listens, and how much it takes."""

    host: Host = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    tls: TLS | None = None
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that share the port; on Linux."""
    open: bool = False
    """Whether anybody who can reach it may use it, where there are no tenants and it is not on loopback."""
    max_body: Count = 32 * 1024 * 1024
    """Bytes of a request's body, as sent and decoded."""
    max_upload: Count = 512 * 1024 * 1024
    """Bytes of a body that is passed on as it comes, to a target by its name."""
    max_head: Annotated[int, Field(ge=1024, le=1024 * 1024)] = 64 * 1024
    """Bytes of a request's line and headers."""
    head_timeout: Seconds = 10.0
    body_timeout: Seconds = 30.0
    """Seconds in which the next part of a request's body must come."""
    send_timeout: Seconds = 60.0
    """Seconds in which a client must take some of what waits for it."""
    deadline: Seconds = 600.0
    """Seconds for all of a call: queues, attempts, backoff and stream."""
    drain_timeout: Amount = 30.0
    max_connections: Count | None = None
    """Of clients, at once; without it half of the files that a process may open."""
    cors_origins: list[str] = Field(default_factory=list)
    rate_limit_headers: bool = True
    access_log: bool = True

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        return formats.origins(origins)


class Admin(Section):
    """Where operators look. Without a token only on loopback."""

    enabled: bool = True
    host: Host = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8081
    tls: TLS | None = None
    token_env: str | None = None

    @field_validator("token_env")
    @classmethod
    def _is_variable(cls, name: str | None) -> str | None:
        return None if name is None else formats.variables([name])[0]


class TenantBudget(Caps):
    """What this one tenant may spend."""


class Tenant(Section):
    """Who may call, by which keys, and how much."""

    key_env: Listed = Field(default_factory=list)
    key_sha256: Listed = Field(default_factory=list)
    weight: Annotated[FiniteFloat, Field(ge=LIGHTEST, le=HEAVIEST)] = 1.0
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    purpose: str | None = None
    models: list[str] | None = None
    passthrough: bool | None = None
    """Whether it may ask targets by name; by default only if it may ask for every model."""
    bulkhead: TenantBulkhead | None = None
    quota: QuotaOptions | None = None
    budget: TenantBudget | None = None

    @field_validator("key_env")
    @classmethod
    def _are_variables(cls, names: list[str]) -> list[str]:
        return formats.variables(names)

    @field_validator("key_sha256")
    @classmethod
    def _are_hashes(cls, hashes: list[str]) -> list[str]:
        if not all(_HASH.fullmatch(one) for one in hashes):
            raise ValueError('64 hexadecimal digits in lower case are expected: printf %s "$KEY" | sha256sum')
        if not _OF_NOTHING.isdisjoint(hashes):
            raise ValueError("is the hash of no key at all, which nobody can show: was $KEY set?")
        return hashes

    @model_validator(mode="after")
    def _has_a_key(self) -> Tenant:
        if not self.key_env and not self.key_sha256:
            raise ValueError("a tenant needs key_env or key_sha256, or nobody could be it")
        return self

    @property
    def may_pass_through(self) -> bool:
        """Tell whether it may ask targets by name."""
        return self.models is None if self.passthrough is None else self.passthrough


class PriceOptions(Section):
    """What a target costs, in US dollars per million tokens."""

    input: Amount
    output: Amount
    cached: Amount | None = None


class TargetOptions(Section):
    """A provider's account, or a server of your own, that can answer."""

    preset: Literal[_PRESET_NAMES] | None = None  # type: ignore[valid-type]
    url: str | None = None
    model: str | None = None
    api_key_env: Listed = Field(default_factory=list)
    provider: str | None = None
    dialect: Literal["openai", "anthropic", "gemini", "bedrock"] | None = None
    auth: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    api_version: str | None = None
    weight: Weight = 1.0
    price: PriceOptions | None = None
    context_window: Window | None = None
    capabilities: list[str] | None = None
    passthrough: bool = False
    tier: str | None = None
    quota: QuotaOptions | None = None
    concurrency: ConcurrencyOptions = ConcurrencyOptions()
    circuit: CircuitOptions = CircuitOptions()
    timeouts: TimeoutOptions | None = None

    @field_validator("api_key_env")
    @classmethod
    def _are_variables(cls, names: list[str]) -> list[str]:
        return formats.variables(names)

    @field_validator("headers")
    @classmethod
    def _are_no_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        return formats.headers(headers)

    @model_validator(mode="after")
    def _is_somewhere(self) -> TargetOptions:
        if self.preset is None and self.url is None:
            raise ValueError(f"a target needs a url, or a preset, of {', '.join(_PRESET_NAMES)}")
        if self.tier is not None and (self.preset is None or self.quota is not None):
            raise ValueError("a tier is one of a preset, and quota is given in its stead")
        return self


def _model_target(given: object) -> object:
    """Read the short form: "target", or "target/what it calls the model"."""
    if not isinstance(given, str | dict):
        raise ValueError('"target", "target/model" or a table is expected')  # noqa: TRY004 - pydantic's way
    if isinstance(given, dict):
        return given
    target, slash, model = given.partition("/")
    return {"target": target, "model": model} if slash else {"target": target}


def _one_or_more(given: object) -> object:
    if not isinstance(given, str | dict | list):
        raise ValueError(  # noqa: TRY004 - pydantic's way
            '"target", "target/model", a table, or a list of these is expected'
        )
    return [given] if isinstance(given, str | dict) else given


class ModelTarget(Section):
    """One of the targets that answer for a model, and what it calls the model."""

    target: str
    model: str | None = None
    weight: Weight | None = None
    context_window: Window | None = None
    price: PriceOptions | None = None


class Model(Section):
    """A model that callers ask for."""

    targets: Annotated[
        list[
            Annotated[ModelTarget, BeforeValidator(_model_target, json_schema_input_type=str | ModelTarget)]
        ],
        BeforeValidator(_one_or_more, json_schema_input_type=str | ModelTarget | list[str | ModelTarget]),
        Field(min_length=1),
    ]
    fallbacks: Listed = Field(default_factory=list)


class TierOptions(Section):
    """One tier of a virtual model."""

    model: str
    up_to: Ratio = 1.0


class VirtualModel(Section):
    """A model that stands for the one that suits a call's complexity (`TierRouter`)."""

    tiers: Annotated[list[TierOptions], Field(min_length=1)]
    prefer: Literal["speed", "balance", "quality"] = "balance"

    @field_validator("tiers")
    @classmethod
    def _rise(cls, tiers: list[TierOptions]) -> list[TierOptions]:
        limits = [tier.up_to for tier in tiers]
        if limits != sorted(limits) or limits[-1] != 1:
            raise ValueError(f"up_to is {limits}; allowed are tiers in the order of up_to, the last up to 1")
        return tiers


class Store(Section):
    """Where several sidecars keep what they share."""

    redis_env: str
    """The environment variable with the URL, which may have a password in it."""
    prefix: str | None = None
    timeout: Seconds | None = None
    lease: Seconds | None = None
    """Seconds after which the slots of a process that was killed come back."""
    on_error: Literal["local", "open", "closed"] = "local"
    share: list[Shared] = Field(
        default_factory=lambda: list[Shared](["quotas", "budgets", "bulkheads", "circuits"])
    )

    @field_validator("redis_env")
    @classmethod
    def _is_variable(cls, name: str) -> str:
        return formats.variables([name])[0]


class Telemetry(Section):
    """Which spans and metrics go where."""

    prometheus: bool = True
    otlp_endpoint: str | None = None
    sample_ratio: Ratio = 0.1
    service_name: str = "resilient-llm"
    semconv: Literal["released", "inference"] = "released"
    record_tenant: bool = True
    tenants_in_metrics: bool = True

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, endpoint: str | None) -> str | None:
        return None if endpoint is None else formats.http_url(endpoint)
