"""Options of the wrong kind: errors that name the option, and none of the internals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from resilient_llm.testing import (
    OK,
    ASGIStreamTransport,
    FakeModel,
    FakeProvider,
    Fault,
    Latency,
    RateLimits,
    VirtualClockEventLoop,
    flapping,
    random_faults,
)

NO_NUMBERS: Sequence[object] = ("x", "", b"x", [], {}, object(), True, -1, math.nan, lambda: 1)


async def _app(*_: object) -> None:
    """Answer nothing."""


def _transport(**options: Any) -> ASGIStreamTransport:
    return ASGIStreamTransport(_app, **options)


def _flapping(**options: Any) -> object:
    return flapping(**{"up": 1.0, "down": 1.0, **options})


_OPTIONS: list[tuple[Callable[..., object], Sequence[str]]] = [
    (
        Fault,
        (
            "status",
            "delay_headers",
            "delay_first_token",
            "token_delay",
            "ping_every",
            "reset_after_tokens",
            "cut_after_tokens",
            "end_after_tokens",
            "stall_after_tokens",
            "error_event_at",
            "malformed_event_at",
            "chunk_size",
        ),
    ),
    (Latency, ("headers", "first_token", "per_token", "spread")),
    (FakeModel, ("max_concurrent", "knee", "overload")),
    (FakeProvider, ("max_requests_kept", "models")),
    (RateLimits, ("requests_per_minute", "tokens_per_minute", "window")),
    (VirtualClockEventLoop, ("patience",)),
    (_transport, ("max_buffer", "disconnect_grace", "connect_delay")),
    (_flapping, ("up", "down")),
]


@pytest.mark.parametrize(
    ("make", "option"),
    [(make, option) for make, options in _OPTIONS for option in options],
)
def test_an_error_names_its_option(make: Callable[..., object], option: str) -> None:
    for wrong in NO_NUMBERS:
        if option == "models" and wrong == {}:
            continue
        with pytest.raises(ValueError, match=rf"^{option} must be "):
            make(**{option: wrong})


@pytest.mark.parametrize("wrong", [5, None, b"x", []])
def test_the_header_of_tenants_is_a_string(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^tenant_header must be a string"):
        FakeProvider(tenant_header=wrong)


@pytest.mark.parametrize("wrong", ["0.5", None, True, math.nan, -0.1, 1.1])
def test_chances_are_numbers(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^probabilities must be "):
        random_faults([(wrong, OK)], rng=random.Random(1))
