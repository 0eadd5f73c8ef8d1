"""What a reply has cost: prices as they are published, and no number where there is none."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from genai_prices import data_snapshot
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import ConfigurationError, Price, Usage, pricing
from resilient_llm.pricing import _published, cost_of, price_of

GPT_4O = Price(input=2.5, output=10, cached=1.25)
LONG = Price(input=3, output=15, cached=0.3, above=[(200_000, Price(input=6, output=22.5, cached=0.6))])


@pytest.mark.parametrize(
    ("price", "usage", "cost"),
    [
        (GPT_4O, Usage(input_tokens=1_000_000, output_tokens=0), 2.5),
        (GPT_4O, Usage(input_tokens=1_000, output_tokens=500, cached_tokens=400), 0.0015 + 0.0005 + 0.005),
        (
            Price(input=1, output=2),
            Usage(input_tokens=1_000_000, output_tokens=0, cached_tokens=400_000),
            1.0,
        ),
        (
            Price(input=1, output=2, cached=0),
            Usage(input_tokens=1_000_000, output_tokens=0, cached_tokens=400_000),
            0.6,
        ),
        (
            GPT_4O,
            Usage(input_tokens=10, output_tokens=10, reasoning_tokens=9),
            0.000125,
        ),  # part of the output
        # beyond a length all of it costs more
        (LONG, Usage(input_tokens=200_000, output_tokens=1_000_000), 0.6 + 15),
        (LONG, Usage(input_tokens=200_001, output_tokens=1_000_000), 6 * 0.200001 + 22.5),
        (LONG, Usage(input_tokens=300_000, output_tokens=0, cached_tokens=300_000), 0.18),
        # what is unknown stays so, unless it costs nothing
        (GPT_4O, Usage(input_tokens=10), None),
        (GPT_4O, Usage(output_tokens=10), None),
        (GPT_4O, Usage(), None),
        (Price(input=0.02, output=0), Usage(input_tokens=1_000_000), 0.02),
        (Price(input=0, output=0), Usage(), 0.0),
        # what no provider should say
        (GPT_4O, Usage(input_tokens=1_000_000, output_tokens=0, cached_tokens=9_000_000), 1.25),
        (GPT_4O, Usage(input_tokens=-5, output_tokens=-5, cached_tokens=-5), 0.0),
        (GPT_4O, Usage(input_tokens=10**400, output_tokens=0), 2.5e6),
    ],
)
def test_what_a_reply_costs(price: Price, usage: Usage, cost: float | None) -> None:
    assert cost_of(price, usage) == (None if cost is None else pytest.approx(cost))


PRICES = st.floats(0, 1e11)
TOKENS = st.none() | st.integers(-10, 10**30)


@given(paid=PRICES, made=PRICES, cached=st.none() | PRICES, read=TOKENS, written=TOKENS, hits=TOKENS)
def test_a_cost_is_a_number_and_cached_tokens_never_make_it_more_than_their_price(
    *, paid: float, made: float, cached: float | None, read: int | None, written: int | None, hits: int | None
) -> None:
    price = Price(input=paid, output=made, cached=cached)
    cost = cost_of(price, Usage(input_tokens=read, output_tokens=written, cached_tokens=hits))
    if cost is None:
        assert read is None or written is None
        return
    assert math.isfinite(cost)
    assert cost >= 0
    dearest = Price(input=max(paid, cached or 0), output=made)
    most = cost_of(dearest, Usage(input_tokens=read, output_tokens=written))
    assert most is None or cost <= most * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"input": -1, "output": 1}, "input=-1: allowed are US dollars per million tokens"),
        ({"input": 1, "output": math.nan}, "output=nan"),
        ({"input": 1, "output": 1, "cached": math.inf}, "cached=inf"),
        ({"input": "1", "output": 1}, "input='1'"),
        ({"input": None, "output": 1}, "input=None"),
        ({"input": True, "output": 1}, "input=True"),
    ],
)
def test_a_price_that_cannot_be(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Price(**options)


def test_steps_are_in_order() -> None:
    low, high = Price(input=2, output=2), Price(input=3, output=3)
    price = Price(input=1, output=1, above=[(200, high), (100, low)])
    assert [price.at(tokens).input for tokens in (0, 100, 101, 200, 201)] == [1, 1, 2, 2, 3]
    assert hash(price) == hash(Price(input=1, output=1, above=((100, low), (200, high))))


def test_one_number_to_compare_by() -> None:
    assert GPT_4O.blended == pytest.approx(4.375)


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("openai", "gpt-4o"),
        ("openai", "gpt-4o-2024-08-06"),
        ("azure.ai.openai", "gpt-4o"),
        ("openrouter", "openai/gpt-4o"),
    ],
)
def test_a_published_price(provider: str, model: str) -> None:
    price = price_of(provider, model)
    assert price is not None
    assert (price.input, price.output) == (2.5, 10)
    assert price_of(provider, model) is price


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("anthropic", "claude-sonnet-4-5"),
        ("gcp.gemini", "gemini-2.5-pro"),
        ("gcp.vertex_ai", "gemini-2.5-pro"),
        ("aws.bedrock", "anthropic.claude-3-5-sonnet-20241022-v2:0"),
        ("mistral_ai", "mistral-large-latest"),
        ("x_ai", "grok-4"),
        ("groq", "llama-3.3-70b-versatile"),
        ("deepseek", "deepseek-chat"),
    ],
)
def test_every_providers_name_is_understood(provider: str, model: str) -> None:
    price = price_of(provider, model)
    assert price is not None
    assert 0 < price.input < price.output


def test_long_contexts_that_cost_more() -> None:
    price = price_of("anthropic", "claude-sonnet-4-5")
    assert price == LONG


def test_a_model_without_output_has_no_price_for_it() -> None:
    price = price_of("openai", "text-embedding-3-small")
    assert price is not None
    assert price.output == 0
    assert cost_of(price, Usage(input_tokens=1_000_000)) == price.input > 0


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        (None, "gpt-4o"),  # whose price?
        ("openai", None),
        ("openai", ""),
        ("openai", "no-such-model"),
        ("vllm", "gpt-4o"),
        ("unknown", "gpt-4o"),
        ("openai", "whisper-1"),  # by the second
    ],
)
def test_where_no_price_is_known_there_is_none(provider: str | None, model: str | None) -> None:
    assert price_of(provider, model) is None


def test_names_that_callers_make_up_are_not_kept() -> None:
    snapshot = data_snapshot.get_snapshot()
    price_of("openai", "gpt-4o")

    def size() -> int:
        return len(snapshot._lookup_cache) + len(snapshot._provider_cache) + len(snapshot._provider_misses)

    before = size()
    for number in range(50):
        price_of("openai", f"gpt-4o-{number}")
        price_of("openai", f"nothing-{number}")
    assert size() == before
    assert _published.cache_info().maxsize == 4096
    kept = _published.cache_info().currsize
    assert price_of("openai", "gpt-4o-" + 1_000_000 * "x") is None  # callers may call it anything
    assert _published.cache_info().currsize == kept


def test_no_network_is_used_and_nothing_is_loaded_before_it_is_needed() -> None:
    program = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("network")

import resilient_llm.presets
assert "genai_prices" not in sys.modules
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from resilient_llm.pricing import price_of
assert price_of("openai", "gpt-4o").input == 2.5
assert "genai_prices" in sys.modules
import threading
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_without_the_package_no_price_is_known() -> None:
    program = """
import sys
sys.modules["genai_prices"] = None
from resilient_llm import Price
from resilient_llm.presets import OPENAI
assert OPENAI.target(model="gpt-4o").price_for() is None
assert OPENAI.target(model="gpt-4o", price=Price(input=1, output=1)).price_for().input == 1
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_a_catalogue_that_fails_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def get_snapshot(self) -> object:
            raise TypeError("changed")

    monkeypatch.setattr(pricing, "_catalogue", Broken)
    assert _published.__wrapped__("openai", "gpt-4o") is None
    assert "genai-prices failed" in caplog.text
