"""Every option of every public class: what it cannot be is an error that names it, and never one of the internals.

Each option of each class is given each of a set of values. `ALLOWED` says which of them it takes; a new option, and a
new class, takes none until it is said here.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import httpx
import httpx2
import pytest

import resilient_llm
import resilient_llm.aiohttp
import resilient_llm.asgi
import resilient_llm.httpx
import resilient_llm.httpx2
import resilient_llm.lab
import resilient_llm.policies
import resilient_llm.presets
import resilient_llm.routing
import resilient_llm.routing.balancers
import resilient_llm.stores
from resilient_llm import (
    SLO,
    AttemptTimeout,
    Backoff,
    Budget,
    Bulkhead,
    Cache,
    Canary,
    CircuitBreaker,
    Clocks,
    Coalesce,
    ConcurrencyLimit,
    ConfigurationError,
    ContextFit,
    Credential,
    Deadline,
    Hedge,
    Idempotency,
    IntentClassifier,
    Limit,
    MemoryLedger,
    Pipeline,
    Price,
    RateLimit,
    Retry,
    Router,
    Stream,
    Target,
    Telemetry,
    Tier,
    TierRouter,
    TokenEstimate,
)
from resilient_llm.aiohttp import AiohttpTransport
from resilient_llm.asgi import ClientAddress, LLMMiddleware, ResilienceMiddleware, TenantHeader
from resilient_llm.lab import (
    Bimodal,
    Burst,
    Chat,
    ClosedLoop,
    Constant,
    Empirical,
    Exponential,
    Key,
    LogNormal,
    Network,
    Outage,
    Paced,
    Phase,
    Poisson,
    Sharing,
    Slots,
    Steps,
    Traffic,
    Uniform,
    Upstream,
    episodes,
    simulate,
)
from resilient_llm.policies.reply_store import MemoryReplyStore
from resilient_llm.presets import Preset
from resilient_llm.routing import Complexity, ComplexityWeights, Keywords, ModelClassifier
from resilient_llm.routing.balancers import (
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)
from resilient_llm.stores import MemoryStore, RedisStore

ITSELF: Final = object()
"""Stands for the class, which somebody has given in place of an object of it."""


async def _later(*_: object) -> object:
    return None


def _one_by_one(*_: object) -> Iterator[object]:
    yield None


def _of_nothing() -> object:
    return None


UNUSED: Final[Mapping[str, Any]] = {
    name: library.MockTransport(_of_nothing) for name, library in (("httpx", httpx), ("httpx2", httpx2))
}
"""Transports by their library; the default ones read certificates when they are made."""

VALUES: Final[Mapping[str, object]] = {
    "None": None,
    "True": True,
    "False": False,
    "x": "x",
    "blank": "",
    "bytes": b"x",
    "-1": -1,
    "0": 0,
    "0.5": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "huge": 10**400,
    "[]": [],
    "{}": {},
    "[None]": [None],
    "[[]]": [[]],
    "{x:3}": {"x": 3},
    "{1:2}": {1: 2},
    "object": object(),
    "class": ITSELF,
    "async": _later,
    "yield": _one_by_one,
    "no-arguments": _of_nothing,
}

SECONDS, SECONDS_FROM_0, RATIO, COUNT, COUNT_FROM_0 = "0.5", "0 0.5", "0 0.5", "", "0"
NAME, FLAG, NAMES = "x", "True False", "[]"
CAP, WEIGHT = "None 0 0.5 inf", "-1 0 0.5"


async def complete(**_: object) -> object:
    return None


def request(_: object) -> Any:
    return None


ALLOWED: Final[Mapping[Callable[..., object], tuple[Mapping[str, Any], Mapping[str, str]]]] = {
    Target: (
        {"name": "t"},
        {
            "name": NAME,
            "address": "x blank",
            "port": "None",
            "url": "None",
            "provider": "None x",
            "dialect": "None",
            "model": "None x",
            "credential": "None",
            "credentials": "[]",
            "auth": "None x",
            "headers": "{}",
            "api_version": "None x",
            "weight": "0.5",
            "price": "None",
            "context_window": "None",
            "capabilities": "None []",
            "policies": "[]",
        },
    ),
    Credential: (
        {"env": "A_KEY"},
        {
            "env": NAME,
            "value": "None",
            "name": "x blank",
            "purposes": NAMES,
            "max_concurrent": "None",
            "requests_per_minute": "None 0.5",
        },
    ),
    Price: (
        {"input": 1.0, "output": 2.0},
        {"input": "0 0.5", "output": "0 0.5", "cached": "None 0 0.5", "above": "[]"},
    ),
    Router: (
        {"targets": {"m": Target(name="t")}},
        {
            "targets": "",
            "fallbacks": "{}",
            "default": "None",
            "balancer": "",
            "patience": SECONDS_FROM_0,
            "max_wait": SECONDS_FROM_0,
            "cool_down": SECONDS_FROM_0,
            "slow_start": SECONDS_FROM_0,
            "estimate": "",
            "name_target": FLAG,
            "random": "",
            "name": NAME,
        },
    ),
    Hedge: (
        {},
        {
            "percentile": "0.5",
            "delay": f"None {SECONDS}",
            "at_least": SECONDS_FROM_0,
            "max_medians": "inf",
            "min_samples": COUNT,
            "window": SECONDS,
            "key": "",
            "max_hedges": COUNT,
            "min_remaining": SECONDS_FROM_0,
            "budget_ratio": RATIO,
            "max_burst": COUNT,
            "max_keys": COUNT,
            "name": NAME,
        },
    ),
    Canary: (
        {"model": "old", "candidate": "new"},
        {
            "model": NAME,
            "candidate": NAME,
            "steps": "",
            "key": "",
            "slo": "",
            "min_calls": COUNT,
            "step_duration": SECONDS,
            "cool_off": SECONDS,
            "restart": FLAG,
            "salt": "None x",
            "purpose": "None x",
            "on_change": "None",
            "random": "",
            "name": NAME,
        },
    ),
    SLO: (
        {"error_increase": 0.1},
        {
            "error_ratio": f"None {RATIO}",
            "error_increase": f"None {RATIO}",
            "client_error_ratio": f"None {RATIO}",
            "client_error_increase": f"None {RATIO}",
            "p99_first_token": "None 0.5",
            "p99_first_token_ratio": "None 0.5",
            "cost": "None 0.5",
            "cost_ratio": "None 0.5",
            "confidence": "",
        },
    ),
    Backoff: ({}, {"initial": "0.5", "multiplier": "", "maximum": "0.5", "jitter": ""}),
    TierRouter: (
        {"models": {"auto": [Tier("small")]}},
        {
            "models": "",
            "prefer": "{}",
            "shift": RATIO,
            "classifier": "None async",
            "complexity": "",
            "estimate": "",
            "name": NAME,
        },
    ),
    Tier: (
        {"model": "small"},
        {"model": NAME, "up_to": RATIO, "classes": NAMES, "lacks": NAMES, "price": "None"},
    ),
    Complexity: ({}, {"weights": "", "keywords": ""}),
    ComplexityWeights: (
        {},
        {
            **dict.fromkeys((field.name for field in dataclasses.fields(ComplexityWeights)), WEIGHT),
            **dict.fromkeys(
                ("full_words", "full_question", "full_prompt", "full_output", "full_tools"), "0.5"
            ),
        },
    ),
    Keywords: ({}, {"words": "{}"}),
    Keywords.default: ({}, {"more": "None {}"}),
    IntentClassifier: ({}, {"complexity": "", "long_question": "0 0.5 inf"}),
    ModelClassifier: (
        {"complete": complete, "model": "m", "labels": ["a", "b"]},
        {
            "complete": "async no-arguments",  # called by names
            "model": NAME,
            "labels": "",
            "timeout": SECONDS,
            "parameters": "{} {x:3}",
            "ttl": SECONDS_FROM_0,
            "max_cached": COUNT_FROM_0,
            "max_failures": COUNT,
            "pause": SECONDS,
            "max_characters": COUNT,
            "name": NAME,
        },
    ),
    Cheapest: ({}, {}),
    LeastOutstandingTokens: ({}, {}),
    PeakEWMA: ({}, {}),
    PrefixAffinity: ({}, {"max_load_ratio": ""}),
    Priority: ({}, {}),
    WeightedLeastConnections: ({}, {"slack_ratio": "0 0.5", "min_speed_ratio": "0.5"}),
    WeightedRandom: ({}, {}),
    Budget: (
        {"tokens_per_day": 1},
        {
            "usd_per_day": CAP,
            "usd_per_month": CAP,
            "tokens_per_day": CAP.removeprefix("None "),
            "tokens_per_month": CAP,
            "key": "",
            "price": "None",
            "unpriced": "",
            "estimate": "",
            "calendar": "None",
            "warn_ratio": f"None {RATIO}",
            "ledger": "None",
            "max_keys": COUNT,
            "dry_run": FLAG,
            "name": NAME,
        },
    ),
    MemoryLedger: ({}, {"max_keys": COUNT}),
    MemoryReplyStore: ({}, {"max_size": COUNT}),
    Coalesce: (
        {},
        {
            "when": "None",
            "share": FLAG,
            "max_wait": f"{SECONDS_FROM_0} inf",
            "max_body": COUNT_FROM_0,
            "ignore_fields": NAMES,
            "ignore_headers": NAMES,
            "name": NAME,
        },
    ),
    Cache: (
        {},
        {
            "ttl": SECONDS,
            "when": "None",
            "share": FLAG,
            "coalesce": FLAG,
            "max_wait": f"{SECONDS_FROM_0} inf",
            "max_body": COUNT_FROM_0,
            "ignore_fields": NAMES,
            "ignore_headers": NAMES,
            "store": "",
            "store_timeout": SECONDS,
            "name": NAME,
        },
    ),
    Idempotency: (
        {},
        {
            "ttl": SECONDS,
            "max_wait": f"{SECONDS_FROM_0} inf",
            "max_body": COUNT_FROM_0,
            "store": "",
            "store_timeout": SECONDS,
            "name": NAME,
        },
    ),
    ContextFit: (
        {"window": 100},
        {
            "window": "{x:3}",
            "on_overflow": "",
            "larger": NAMES,
            "output_tokens": COUNT_FROM_0,
            "granularity_ratio": RATIO,
            "estimate": "",
            "name": NAME,
        },
    ),
    TokenEstimate: (
        {},
        {
            "bytes_per_token": "0.5",
            "output_tokens": COUNT_FROM_0,
            "attachment_tokens": COUNT_FROM_0,
            "encoding": "None",
        },
    ),
    # Limits
    Bulkhead: (
        {"max_concurrent": 1, "shared": 1},
        {
            "max_concurrent": COUNT,
            "max_queued": COUNT_FROM_0,
            "max_wait": f"{SECONDS_FROM_0} inf",
            "key": "",
            "shared": "None",
            "max_queued_total": "None",
            "weights": "None {} {x:3} {1:2}",
            "cost": "None",
            "ageing": SECONDS_FROM_0,
            "max_keys": COUNT,
            "dry_run": FLAG,
            "store": "None",
            "name": NAME,
        },
    ),
    ConcurrencyLimit: (
        {},
        {
            "initial": COUNT,
            "min": COUNT,
            "max": COUNT,
            "decrease_ratio": "0.5",
            "min_gain_ratio": "None 0 0.5",
            "max_queued": COUNT_FROM_0,
            "max_wait": f"{SECONDS_FROM_0} inf",
            "key": "",
            "max_queued_total": "None",
            "weights": "None {} {x:3} {1:2}",
            "ageing": SECONDS_FROM_0,
            "max_keys": COUNT,
            "algorithm": "None",
            "dry_run": FLAG,
            "store": "None",
            "name": NAME,
        },
    ),
    RateLimit: (
        {"burst": 1.0},
        {
            "requests_per_minute": "None 0.5",
            "tokens_per_minute": "None 0.5",
            "burst": "0.5",
            "key": "None",
            "window": SECONDS,
            "learn": f"None {FLAG}",
            "limits": "[]",
            "max_wait": f"{SECONDS_FROM_0} inf",
            "max_queued": COUNT_FROM_0,
            "max_queued_total": "None 0",
            "weights": "None {} {x:3} {1:2}",
            "ageing": SECONDS_FROM_0,
            "cost": "None",
            "estimate": "",
            "oversize": "",
            "max_keys": COUNT,
            "dry_run": FLAG,
            "store": "None",
            "name": NAME,
        },
    ),
    Limit: (
        {"key": None, "burst": 1.0},
        {
            "key": "None",
            "requests_per_minute": "None 0.5",
            "tokens_per_minute": "None 0.5",
            "burst": "0.5",
            "window": SECONDS,
            "learn": f"None {FLAG}",
            "scope": f"None {NAME}",
        },
    ),
    # Failures and time
    CircuitBreaker: (
        {"slow_call_ratio": 0.5, "slow_call_duration": 1.0},
        {
            "failure_ratio": "None 0.5",
            "minimum_throughput": COUNT,
            "sampling_duration": "None 0.5",
            "sampling_calls": "None",
            "consecutive_failures": "None",
            "slow_call_ratio": "0.5",
            "slow_call_duration": "0.5",
            "break_duration": SECONDS,
            "break_multiplier": "",
            "max_break_duration": "",
            "break_jitter_ratio": "0 0.5",
            "half_open_max_calls": COUNT,
            "success_threshold": COUNT,
            "probe_timeout": SECONDS,
            "key": "",
            "max_keys": COUNT,
            "dry_run": FLAG,
            "random": "",
            "store": "None",
            "name": NAME,
        },
    ),
    Deadline: ({"total": 1.0}, {"total": SECONDS, "header": f"None {NAME}"}),
    AttemptTimeout: (
        {"whole_reply": 1.0},
        {
            "headers": f"None {SECONDS}",
            "first_content": f"None {SECONDS}",
            "content_gap": f"None {SECONDS}",
            "whole_reply": SECONDS,
            "for_call": "None",
            "name": NAME,
        },
    ),
    Retry: (
        {},
        {
            "max_attempts": COUNT,
            "backoff": "",
            "max_retry_after": SECONDS_FROM_0,
            "min_remaining": SECONDS_FROM_0,
            "budget_ratio": RATIO,
            "budget_min_per_second": "0 0.5",
            "retry_ambiguous": FLAG,
            "idempotency_key": FLAG,
            "max_replay_body": COUNT_FROM_0,
            "random": "",
            "name": NAME,
        },
    ),
    Stream: (
        {},
        {
            "resume": "",
            "prefill": "None [] {}",
            "hold_max": COUNT_FROM_0,
            "malformed": "",
            "max_event_size": COUNT,
            "include_usage": FLAG,
            "name": NAME,
        },
    ),
    # Doors
    Pipeline: (
        {},
        {
            "policies": "[]",
            "handler": "None async",
            "door": "",
            "name": NAME,
            "telemetry": "None",
            "profile": "",
            "classify_error": "",
            "classify_result": "None",
            "max_threads": COUNT,
        },
    ),
    ResilienceMiddleware: (
        {"app": _later, "tenant": None},
        {
            "tenant": "None x async",
            "policies": "[]",
            "known_tenants": "None [] {} {x:3} async",
            "default_tenant": f"None {NAME}",
            "tenant_timeout": f"{SECONDS} inf",
            "cancel_on_disconnect": f"None {FLAG}",
            "max_buffered_body": COUNT,
            "drain_timeout": f"{SECONDS_FROM_0} inf",
            "error_format": "",
            "name": NAME,
            "telemetry": "None",
        },
    ),
    LLMMiddleware: (
        {"app": _later, "transport": UNUSED["httpx"]},
        {
            "policies": "[]",
            "client": "None class",
            "library": "",
            "state_name": NAME,
            "on_rejection": "",
            "name": NAME,
            "telemetry": "None",
        },
    ),
    Telemetry: (
        {},
        {
            "tracer_provider": "None",
            "meter_provider": "None",
            "semconv": "",
            "propagate": FLAG,
            "record_tenant": FLAG,
            "models": f"None {NAMES}",
            "tenants": f"None {NAMES}",
            "listener": "None class no-arguments",
        },
    ),
    Clocks: (
        {},
        dict.fromkeys(("headers", "first_content", "content_gap", "whole_reply"), f"{SECONDS} inf"),
    ),
    TenantHeader: ({"name": "x"}, {"name": NAME, "trusted_peers": "None []"}),
    ClientAddress: ({}, {"trusted_peers": "[]"}),
    **{
        transport: (
            given,
            {
                "policies": "[]",
                "on_rejection": "",
                "name": NAME,
                "telemetry": "None",
            },
        )
        for transport, given in (
            (resilient_llm.aiohttp.ResilientSession, {}),
            (resilient_llm.httpx.ResilientTransport, {"transport": UNUSED["httpx"]}),
            (resilient_llm.httpx2.ResilientTransport, {"transport": UNUSED["httpx2"]}),
        )
    },
    AiohttpTransport: (
        {},
        {"ssl": "None", "connect_timeout": f"{SECONDS} inf", "keepalive": f"{SECONDS} inf"},
    ),
    Preset: (
        {"name": "p"},
        {
            "name": NAME,
            "provider": f"None {NAME}",
            "dialect": f"None {NAME}",
            "url": f"None {NAME}",
            "openai_url": f"None {NAME}",
            "circuit": "",
            "retries": "",
            "concurrency": "",
            "tiers": "{}",
            "paced": FLAG,
            "note": "x blank",
            "sources": "[]",
        },
    ),
    # The lab
    Upstream: (
        {},
        {
            "first_token": "0 0.5 inf",
            "per_token": "0 0.5 inf",
            "total": "None 0 0.5 inf",
            "output_tokens": "0 0.5 inf",
            "max_events": COUNT,
            "failures": "{}",
            "failure_latency": "0 0.5 inf",
            "outages": "[]",
            "phases": "[]",
            "capacity": "None",
            "rate_limits": "None",
            "keys": "None {}",
            "max_usd": "0.5 inf",
            "input_price": "0 0.5",
            "output_price": "0 0.5",
            "context_window": "None",
        },
    ),
    Key: ({}, {"rate_limits": "None", "max_usd": "0.5 inf"}),
    Outage: (
        {"start": 0.0, "end": 1.0},
        {
            "start": SECONDS_FROM_0,
            "end": f"{SECONDS} inf",
            "kind": "",
            "share": "0.5",
            "key": "None x",
            "retry_after": f"None {SECONDS_FROM_0}",
        },
    ),
    Phase: (
        {"start": 0.0, "end": 1.0},
        {
            "start": SECONDS_FROM_0,
            "end": f"{SECONDS} inf",
            "latency_factor": "0.5",
            "capacity_factor": "0.5",
        },
    ),
    Sharing: ({"limit": 4}, {"limit": "inf", "slowdown": "", "refusal_ratio": "", "refuse_with": ""}),
    Slots: ({"limit": 4}, {"limit": "inf", "max_queued": "0 0.5 inf", "refuse_with": ""}),
    Constant: ({}, {"value": "0 0.5 inf"}),
    Uniform: ({"low": 0.0, "high": 9.0}, {"low": "0 0.5", "high": "0 0.5 inf"}),
    Exponential: ({}, {"mean": "0.5"}),
    LogNormal: ({"median": 1.0, "sigma": 1.0}, {"median": "0.5", "sigma": "0 0.5"}),
    LogNormal.of_mean: ({"mean": 1.0, "sigma": 1.0}, {"mean": "0.5", "sigma": "0 0.5"}),
    Bimodal: (
        {"base": 1.0, "share": 0.1, "factor": 2.0},
        {"base": "0 0.5 inf", "share": RATIO, "factor": "0 0.5 inf"},
    ),
    Empirical: ({"values": [1.0]}, {"values": "", "weights": "None"}),
    Poisson: ({"rate": 1.0}, {"rate": "0.5", "start": SECONDS_FROM_0}),
    Paced: ({"every": 1.0}, {"every": SECONDS, "start": SECONDS_FROM_0}),
    Burst: ({"calls": 1}, {"calls": COUNT, "start": SECONDS_FROM_0, "every": f"{SECONDS} inf"}),
    Steps: ({}, {"rates": ""}),
    ClosedLoop: (
        {"workers": 1},
        {
            "workers": COUNT,
            "think": "0 0.5 inf",
            "start": SECONDS_FROM_0,
            "after_failure": SECONDS,
        },
    ),
    Chat: (
        {},
        {
            "model": f"{NAME} {{x:3}}",
            "prompt_tokens": "0 0.5 inf",
            "max_tokens": "None 0 0.5 inf",
            "stream_ratio": RATIO,
            "questions": "None",
            "system_tokens": COUNT_FROM_0,
            "url": NAME,
            "api": "",
            "key": NAME,
            "fields": "{} {x:3}",
        },
    ),
    Traffic: (
        {"arrivals": Poisson(1), "request": request},
        {"arrivals": "", "request": "", "tenant": "None x", "priority": "-1 0", "timeout": "None 0 0.5"},
    ),
    MemoryStore: ({}, {"name": NAME}),
    RedisStore: (
        {"server": "redis://127.0.0.1:1"},
        {
            "server": "",
            "prefix": "x blank",
            "timeout": "0.5",
            "on_store_error": "",
            "clock": "",
            "lease": "0.5",
            "name": NAME,
        },
    ),
    Network: ({"upstreams": Upstream()}, {"upstreams": "", "read_timeout": f"{SECONDS} inf"}),
    episodes: (
        {"good": 1.0, "bad": 1.0, "until": 5.0},
        {"good": "0 0.5 inf", "bad": "0 0.5 inf", "until": SECONDS_FROM_0, "seed": "x blank -1 0"},
    ),
    simulate: (
        {"policies": [], "network": Network(Upstream()), "traffic": Burst(1), "calls": 1},
        {
            "policies": "[]",
            "network": "",
            "traffic": "",
            "calls": "",
            "duration": f"{SECONDS} inf",
            "seed": "x blank -1 0",
            "gauges": "None {}",
            "sample_every": SECONDS,
            "telemetry": "None",
            "backend": "",
        },
    ),
}
"""By class: the options it needs, and which values each option takes."""

ELSEWHERE = {"app", "session", "transport"}
"""What is wrapped: `tests/policies/test_options.py` says which errors there are for it."""

RESULTS = {
    "Bucket",
    "BudgetLevel",
    "CallRecord",
    "CanaryChange",
    "CanaryStatus",
    "CircuitState",
    "Exchange",
    "Health",
    "Latency",
    "LimitLevel",
    "PipelineDescription",
    "PolicyDescription",
    "Report",
    "RolloutState",
    "Source",
    "Summary",
    "TargetHealth",
    "UpstreamReport",
}
"""What is given to applications, and never made by them."""

MESSAGES = {"Call", "Outcome", "Profile", "Reply", "Request", "Scope", "Usage", "Verdict"}
"""What each call is made of: whoever is given one takes it as it is, or looks at it then."""

AIOHTTPS = {"Connector"}
"""What takes the options of another library's class, which checks them."""


def _cases() -> Iterator[Any]:
    for make, (given, allowed) in ALLOWED.items():
        options = inspect.signature(make).parameters
        assert set(allowed) == set(options) - ELSEWHERE, make
        for option, takes in allowed.items():
            yield pytest.param(make, given, option, takes.split(), id=f"{make.__qualname__}-{option}")


@pytest.mark.parametrize(("make", "given", "option", "takes"), list(_cases()))
def test_an_option_takes_what_it_can_be_and_names_itself_where_it_cannot(
    make: Callable[..., object], given: Mapping[str, Any], option: str, takes: list[str]
) -> None:
    for label, value in VALUES.items():
        options = {**given, option: make if value is ITSELF else value}
        if label in takes:
            make(**options)
            continue
        with pytest.raises(ConfigurationError) as raised:
            make(**options)
        assert option in str(raised.value), label


def _classes(module: ModuleType) -> Iterator[str]:
    for name in module.__all__:
        one = getattr(module, name)
        if (
            isinstance(one, type)
            and not issubclass(one, BaseException)
            and not getattr(one, "_is_protocol", False)
        ):
            yield name


@pytest.mark.parametrize(
    "module",
    [
        resilient_llm,
        resilient_llm.aiohttp,
        resilient_llm.asgi,
        resilient_llm.httpx,
        resilient_llm.httpx2,
        resilient_llm.policies,
        resilient_llm.routing,
        resilient_llm.routing.balancers,
        resilient_llm.presets,
        resilient_llm.lab,
        resilient_llm.stores,
    ],
)
def test_no_class_is_left_out(module: ModuleType) -> None:
    known = {getattr(make, "__name__", "") for make in ALLOWED}
    assert set(_classes(module)) - known - RESULTS - MESSAGES - AIOHTTPS == set()
