"""Options of the wrong kind: errors that name the option, the value and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from resilient_llm import (
    Bulkhead,
    CircuitBreaker,
    ConcurrencyLimit,
    ConfigurationError,
    Deadline,
    Limit,
    Pipeline,
    Profile,
    Retry,
    Telemetry,
    ambient,
)
from resilient_llm.asgi import LLMMiddleware, ResilienceMiddleware
from resilient_llm.httpx import ResilientTransport
from resilient_llm.httpx2 import ResilientTransport as ResilientTransport2

HUGE = 10**400


def _bulkhead(**options: Any) -> Bulkhead:
    return Bulkhead(**{"max_concurrent": 1, **options})


def _limit(**options: Any) -> Limit:
    return Limit(**{"key": None, "requests_per_minute": 60, **options})


async def _app(*_: object) -> None:
    """Answer nothing."""


def _guard(**options: Any) -> ResilienceMiddleware:
    return ResilienceMiddleware(**{"app": _app, "tenant": None, **options})


def _llm(**options: Any) -> LLMMiddleware:
    return LLMMiddleware(**{"app": _app, **options})


@pytest.mark.parametrize("make", [_bulkhead, ConcurrencyLimit, CircuitBreaker])
@pytest.mark.parametrize("wrong", ["false", 0, 1, None])
def test_dry_run_is_true_or_false(make: Callable[..., object], wrong: object) -> None:
    with pytest.raises(ConfigurationError, match=r"dry_run=.*: allowed are True and False"):
        make(dry_run=wrong)


_WRONG_PROFILES: list[dict[str, Any]] = [
    {"provider": 5},
    {"operation": ""},
    {"model": b"gpt-4o"},
    {"stream": "no"},
    {"repeat_safe": 0},
]

_WRONG: list[tuple[Callable[..., object], str, Sequence[object]]] = [
    (_bulkhead, "max_wait", (HUGE, "1", math.nan, True)),
    (_bulkhead, "ageing", (HUGE, None, math.inf)),
    (_bulkhead, "name", ("", None, 5)),
    (ConcurrencyLimit, "max_wait", (HUGE, "1")),
    (ConcurrencyLimit, "ageing", (HUGE, "1")),
    (ConcurrencyLimit, "decrease_ratio", ("x", None, [], 0, 1, math.nan, True, HUGE)),
    (ConcurrencyLimit, "min_gain_ratio", ("x", [], -1, 1, math.nan, True, HUGE)),
    (ConcurrencyLimit, "algorithm", ("x", 5, [], object)),
    (ConcurrencyLimit, "name", ("", None)),
    (CircuitBreaker, "failure_ratio", ("x", 0, 2, math.nan, True)),
    (CircuitBreaker, "break_duration", ("x", None, 0, HUGE)),
    (CircuitBreaker, "minimum_throughput", ("x", 0)),
    (CircuitBreaker, "max_keys", ("x", 0)),
    (CircuitBreaker, "name", ("", 5)),
    (Deadline, "total", (HUGE, "1", None, 0)),
    (Retry, "max_retry_after", (HUGE, "1")),
    (Retry, "budget_ratio", ("x", None, 2, math.nan)),
    (Retry, "budget_min_per_second", ("x", -1, math.inf, HUGE)),
    (Retry, "retry_ambiguous", ("no", None, 1)),
    (Retry, "idempotency_key", ("no", None, 1)),
    (Retry, "backoff", (None, 1.0)),
    (_limit, "window", (HUGE, "1")),
    (_limit, "requests_per_minute", (HUGE, "1", math.nan)),
    (_limit, "learn", ("yes", 1)),
    (_limit, "scope", ("", 5)),
    (Pipeline, "policies", (None, 5, "retry", b"retry", {"retry": 1}, [None], ["retry"], [Retry], Retry())),
    (Pipeline, "handler", (5, "x")),
    (Pipeline, "door", ("http", None, [])),
    (Pipeline, "telemetry", ("x", 5, Telemetry)),
    (Pipeline, "policies", ([lambda: None], [lambda _call: None])),
    (
        Pipeline,
        "profile",
        (None, "openai", Profile, *(Profile(**one) for one in _WRONG_PROFILES)),
    ),
    (Pipeline, "max_threads", ("x", None, 0, 1.5, True)),
    (Pipeline, "classify_error", (None, "x")),
    (Pipeline, "classify_result", (5, "x")),
    (Pipeline, "name", (None, "")),
    (_guard, "cancel_on_disconnect", ("no", 0)),
    (_guard, "default_tenant", (5, "")),
    (_guard, "drain_timeout", (HUGE, "1")),
    (_guard, "error_format", ([], {}, "xml")),
    (_guard, "policies", (None, "retry", [5])),
    (_guard, "telemetry", ("x", Telemetry)),
    (_guard, "name", ("", None)),
    (_guard, "tenant_timeout", ("1", None, 0)),
    (_guard, "max_buffered_body", ("1", 0, None)),
    (_guard, "known_tenants", ("acme", 5, [1], {1: "acme"}, ["acme", ""], lambda: True)),
    (_guard, "tenant", (5, [], lambda: "acme", lambda _scope, _more: "acme")),
    (_guard, "app", (5, None, "app", lambda _scope: None)),
    (_llm, "app", (5, None, "app", lambda _scope: None)),
    (_llm, "state_name", (None, 5, "no name", "class", "None")),
    (_llm, "policies", (None, "retry", [5])),
    (_llm, "telemetry", ("x", Telemetry)),
    (_llm, "name", ("", None)),
    (_llm, "client", (5, "x", lambda: 1, lambda _transport, _more: 1, Telemetry)),
    (_llm, "library", (None, [], "requests")),
    (_llm, "on_rejection", (None, [], "ignore")),
    *(
        (transport, option, wrong)
        for transport in (ResilientTransport, ResilientTransport2)
        for option, wrong in (
            ("policies", (None, "retry", [5], Retry())),
            ("on_rejection", (None, [], "ignore")),
            ("name", ("", None)),
            ("telemetry", ("x", Telemetry)),
        )
    ),
]


@pytest.mark.parametrize(
    ("make", "option", "wrong"),
    [(make, option, wrong) for make, option, values in _WRONG for wrong in values],
)
def test_each_error_names_its_option(make: Callable[..., object], option: str, wrong: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make(**{option: wrong})
    assert option in str(raised.value)


@pytest.mark.parametrize("make", [_llm, ResilientTransport, ResilientTransport2])
@pytest.mark.parametrize("wrong", ["x", 5, object()])
def test_what_is_no_transport_is_a_type_error_that_names_it(
    make: Callable[..., object], wrong: object
) -> None:
    with pytest.raises(
        TypeError, match=f"transport must be an async transport of .*{re.escape(repr(wrong))}"
    ):
        make(transport=wrong)


_WRONG_AMBIENT: dict[str, Sequence[object]] = {
    "tenant": (5, [], b"a"),
    "timeout": ("1", -1, math.nan, HUGE, True),
    "priority": ("high", 1.5, math.nan, HUGE, -HUGE, True),
}


@pytest.mark.parametrize(
    ("option", "wrong"), [(option, wrong) for option, values in _WRONG_AMBIENT.items() for wrong in values]
)
def test_so_does_ambient(option: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{option}="), ambient(**{option: wrong}):
        pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: 1, r"client=.*can be called with one argument: too many positional arguments"),
        (lambda _transport, _more: 1, r"client=.*one argument: missing a required argument: '_more'"),
    ],
)
def test_a_function_of_other_arguments_is_told_which(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _llm(client=wrong)


@pytest.mark.parametrize("right", [max, print, dict, lambda *_: None, lambda a, b=None: b])
def test_what_may_be_called_so_is_let_be(right: Any) -> None:
    _llm(client=right)
