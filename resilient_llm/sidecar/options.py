"""The tables of a configuration that are options of one policy each, by the names the policy has for them.

A key that is left out has the policy's own default. What a value means, and most of what is allowed, the policies
say; here are types, so that an error can name the key.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

__all__ = [
    "BackoffOptions",
    "BudgetOptions",
    "BulkheadOptions",
    "CacheOptions",
    "CanaryOptions",
    "CircuitOptions",
    "ConcurrencyOptions",
    "Count",
    "HedgeOptions",
    "Listed",
    "Positive",
    "QuotaOptions",
    "Ratio",
    "RetryOptions",
    "RoutingOptions",
    "SLOOptions",
    "Seconds",
    "Section",
    "StreamOptions",
    "TimeoutOptions",
]


class Section(BaseModel):
    """A table: no key that is not known, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def given(self) -> dict[str, object]:
        """Give the options that stand in the file, as keyword arguments."""
        return {
            name: value.given() if isinstance(value, Section) else value
            for name in self.model_fields_set
            if name != "enabled" and (value := getattr(self, name)) is not None
        }


def _listed(value: object) -> object:
    if not isinstance(value, str | list):
        raise ValueError("a string, or a list of strings, is expected")  # noqa: TRY004 - pydantic's way
    return [value] if isinstance(value, str) else value


Seconds = Annotated[FiniteFloat, Field(gt=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Ratio = Annotated[FiniteFloat, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
KeyName = Literal["tenant", "target", "model"]
CountOrNone = Annotated[int, Field(ge=0)]
Listed = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
"""One string, or a list of them."""


class Switchable(Section):
    """A policy that is there unless it is switched off."""

    enabled: bool = True


class BulkheadOptions(Switchable):
    """How many calls of one tenant run at once, and of all tenants together (`Bulkhead`)."""

    max_concurrent: Count = 200
    max_queued: CountOrNone = 1000
    max_wait: Seconds = 30.0
    shared: Count | None = None
    max_queued_total: Count | None = None
    cost: Literal["tokens"] | None = None
    dry_run: bool = False


class TenantBulkhead(Section):
    """How many calls of this one tenant run at once, besides what is allowed for all."""

    max_concurrent: Count
    max_queued: CountOrNone = 1000
    max_wait: Seconds = 30.0


class QuotaOptions(Section):
    """How many requests and tokens a minute (`RateLimit`)."""

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    burst: Positive | None = None
    window: Seconds | None = None
    max_wait: Amount | None = None
    max_queued: CountOrNone | None = None
    oversize: Literal["refuse", "borrow"] | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _limits_something(self) -> QuotaOptions:
        if self.requests_per_minute is self.tokens_per_minute is self.burst is None:
            raise ValueError("give at least one of requests_per_minute, tokens_per_minute and burst")
        return self


class Caps(Section):
    """What may be spent (`Budget`)."""

    usd_per_day: Amount | None = None
    usd_per_month: Amount | None = None
    tokens_per_day: Amount | None = None
    tokens_per_month: Amount | None = None


class BudgetOptions(Caps):
    """What each tenant may spend (`Budget`); a tenant's own table replaces single caps."""

    unpriced: Literal["refuse", "allow"] = "refuse"
    warn_ratio: Ratio | None = None
    dry_run: bool = False


class BackoffOptions(Section):
    """How long to wait before a retry (`Backoff`)."""

    initial: Seconds | None = None
    multiplier: Positive | None = None
    maximum: Seconds | None = None
    jitter: Literal["full", "none"] | None = None


class RetryOptions(Switchable):
    """How often a failed attempt is made again (`Retry`)."""

    max_attempts: Count | None = None
    backoff: BackoffOptions | None = None
    max_retry_after: Amount | None = None
    budget_ratio: Ratio | None = None
    budget_min_per_second: Amount | None = None
    retry_ambiguous: bool | None = None


class HedgeOptions(Section):
    """When a second attempt is made of another target (`Hedge`)."""

    percentile: Ratio | None = None
    delay: Seconds | None = None
    at_least: Amount | None = None
    min_samples: Count | None = None
    window: Seconds | None = None
    max_hedges: Count | None = None
    budget_ratio: Ratio | None = None


class CacheOptions(Section):
    """Which replies are kept, and for how long (`Cache`)."""

    ttl: Seconds | None = None
    share: bool | None = None
    coalesce: bool | None = None
    max_wait: Seconds | None = None
    max_body: Count | None = None


class StreamOptions(Section):
    """What becomes of streams that break (`Stream`)."""

    resume: (
        Annotated[
            list[Literal["error", "continue", "buffer"]],
            BeforeValidator(_listed, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    prefill: list[str] | None = None
    hold_max: CountOrNone | None = None
    malformed: Literal["pass", "skip"] | None = None
    max_event_size: Count | None = None
    include_usage: bool | None = None


class RoutingOptions(Section):
    """How a router waits and returns (`Router`)."""

    default: str | None = None
    patience: Amount | None = None
    max_wait: Amount | None = None
    cool_down: Amount | None = None
    slow_start: Amount | None = None
    name_target: bool | None = None
    balancer: Literal[
        "cheapest",
        "least_outstanding_tokens",
        "peak_ewma",
        "prefix_affinity",
        "priority",
        "weighted_least_connections",
        "weighted_random",
    ] = "weighted_least_connections"


class SLOOptions(Section):
    """How well the candidate of a canary must do (`SLO`)."""

    error_ratio: Ratio | None = None
    error_increase: Ratio | None = None
    client_error_ratio: Ratio | None = None
    client_error_increase: Ratio | None = None
    p99_first_token: Seconds | None = None
    p99_first_token_ratio: Positive | None = None
    cost: Positive | None = None
    cost_ratio: Positive | None = None
    confidence: Ratio | None = None


class CanaryOptions(Section):
    """Which share of a model's calls another model gets, and for how long (`Canary`)."""

    model: str
    candidate: str
    steps: Annotated[list[Ratio], Field(min_length=1)] | None = None
    key: (
        Annotated[
            list[KeyName],
            BeforeValidator(_listed, json_schema_input_type=KeyName | list[KeyName]),
            Field(min_length=1),
        ]
        | None
    ) = None
    """What stays together."""
    slo: SLOOptions | None = None
    min_calls: Count | None = None
    step_duration: Seconds | None = None
    cool_off: Seconds | None = None
    restart: bool | None = None
    salt: str | None = None
    purpose: str | None = None


class CircuitOptions(Switchable):
    """When a target is left alone (`CircuitBreaker`)."""

    failure_ratio: Ratio | None = None
    minimum_throughput: Count | None = None
    sampling_duration: Seconds | None = None
    sampling_calls: Count | None = None
    consecutive_failures: Count | None = None
    slow_call_ratio: Ratio | None = None
    slow_call_duration: Seconds | None = None
    break_duration: Seconds | None = None
    break_multiplier: Positive | None = None
    max_break_duration: Seconds | None = None
    half_open_max_calls: Count | None = None
    success_threshold: Count | None = None
    dry_run: bool | None = None


class ConcurrencyOptions(Switchable):
    """How many attempts a target can take at once (`ConcurrencyLimit`)."""

    initial: Count | None = None
    min: Count | None = None
    max: Count | None = None
    max_queued: CountOrNone | None = None
    max_wait: Seconds | None = None
    dry_run: bool | None = None


class TimeoutOptions(Section):
    """How long the parts of an attempt may take (`AttemptTimeout`)."""

    headers: Seconds | None = None
    first_content: Seconds | None = None
    content_gap: Seconds | None = None
    whole_reply: Seconds | None = None
