"""What models cost: prices that are given or looked up, and what a reply's tokens come to.

Prices are looked up in the package genai-prices (the extra `prices`), in the copy it ships: no network is used. When
there is none, nothing is guessed. Who may spend how much must not enter here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from resilient_llm._kept import LONGEST_MODEL
from resilient_llm.errors import ConfigurationError

if TYPE_CHECKING:
    from resilient_llm.outcome import Usage

__all__ = ["Price", "cost_of", "price_of"]

logger = logging.getLogger("resilient_llm")

_MILLION = 1e6
_MOST_TOKENS = 10**12
"""More than any reply has; a provider may write any number."""

_CATALOGUE = {
    "aws.bedrock": "aws",
    "azure.ai.inference": "azure",
    "azure.ai.openai": "azure",
    "gcp.gemini": "google",
    "gcp.vertex_ai": "google",
    "mistral_ai": "mistral",
    "x_ai": "x-ai",
}
"""What the catalogue calls providers, where that is not their name in OpenTelemetry's conventions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model costs, in US dollars per million tokens.

    `cached` is for the part of the input that was read from the provider's prompt cache; `None` is the price of other
    input. `above` are pairs of a number of input tokens and the `Price` of requests that have more, for *all* of
    their tokens, as providers charge for long contexts.
    """

    input: float
    output: float
    cached: float | None = None
    above: Sequence[tuple[int, Price]] = ()

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            if value is None and name == "cached":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
                raise ConfigurationError(
                    f"{name}={value!r}: allowed are US dollars per million tokens, from 0"
                )
        if isinstance(self.above, str | bytes | Mapping) or not isinstance(self.above, Iterable):
            raise _no_steps(self.above)
        above = tuple(self.above)
        if not all(map(_is_step, above)):
            raise _no_steps(above)
        object.__setattr__(self, "above", tuple(sorted(above, key=lambda step: step[0])))

    @property
    def blended(self) -> float:
        """Give one number to compare models by: three tokens of input for one of output."""
        return 0.75 * self.input + 0.25 * self.output

    def at(self, input_tokens: int) -> Price:
        """Give the price of a request with so many tokens of input."""
        for least, price in reversed(self.above):
            if input_tokens > least:
                return price
        return self


def _is_step(step: object) -> bool:
    if not isinstance(step, tuple | list) or len(step) != 2:
        return False
    least, price = step
    return isinstance(least, int) and not isinstance(least, bool) and least >= 0 and isinstance(price, Price)


def _no_steps(above: object) -> ConfigurationError:
    return ConfigurationError(
        f"above={above!r}: allowed are pairs of a number of input tokens, from 0, and a Price"
    )


def cost_of(price: Price, usage: Usage) -> float | None:
    """Give what a reply has cost in US dollars; `None` while tokens that cost something are not known.

    Cached tokens that nobody has counted are taken for input like any other, so that the cost is at most that.
    """
    price = price.at(_count(usage.input_tokens) or 0)
    input_tokens, output_tokens = _count(usage.input_tokens), _count(usage.output_tokens)
    cached = min(_count(usage.cached_tokens) or 0, input_tokens or 0)
    for tokens, each in ((input_tokens, price.input), (output_tokens, price.output)):
        if tokens is None and each:
            return None
    read = price.input if price.cached is None else price.cached
    fresh = (input_tokens or 0) - cached
    return (fresh * price.input + cached * read + (output_tokens or 0) * price.output) / _MILLION


def _count(tokens: int | None) -> int | None:
    return None if tokens is None else max(0, min(int(tokens), _MOST_TOKENS))


def price_of(provider: str | None, model: str | None) -> Price | None:
    """Give the price that a provider publishes for a model; `None` where it is not known.

    `provider` is a value of `gen_ai.provider.name`. Looked up once for each model, and kept: a price that changes by
    the hour, or on a day to come, is that of the first time. The first look-up loads genai-prices, which takes a
    quarter of a second; `None` without it.
    """
    if not provider or not model or len(model) > LONGEST_MODEL:
        return None
    return _published(provider, model)


@lru_cache(maxsize=4096)
def _published(provider: str, model: str) -> Price | None:
    catalogue = _catalogue()
    if catalogue is None:
        return None
    try:
        # Not by its `calc_price`, which keeps every name it was ever asked for.
        snapshot = catalogue.get_snapshot()
        seller = snapshot.find_provider(None, _CATALOGUE.get(provider, provider), None)
        found = seller.find_model(model, all_providers=snapshot.providers)
        now = datetime.now(tz=UTC)  # noqa: TID251 - prices go by the calendar, not by anyio's clock
        return None if found is None else _price(found.get_prices(now))
    except LookupError:
        return None
    except Exception:  # a price is never worth a call
        logger.warning("no price of %r at %r: genai-prices failed", model, provider, exc_info=True)
        return None


class _Tier(Protocol):
    start: int
    price: object


class _Tiered(Protocol):
    base: object
    tiers: Sequence[_Tier]


class _ModelPrice(Protocol):
    input_mtok: object
    output_mtok: object
    cache_read_mtok: object


class _Model(Protocol):
    def get_prices(self, request_timestamp: datetime) -> _ModelPrice: ...


class _Provider(Protocol):
    def find_model(self, model_ref: str, *, all_providers: Sequence[_Provider]) -> _Model | None: ...


class _Snapshot(Protocol):
    providers: Sequence[_Provider]

    def find_provider(self, model_ref: None, provider_id: str, provider_api_url: None) -> _Provider: ...


class _Catalogue(Protocol):
    """What is used of genai-prices."""

    def get_snapshot(self) -> _Snapshot: ...


@lru_cache(maxsize=1)
def _catalogue() -> _Catalogue | None:
    try:
        return cast("_Catalogue", import_module("genai_prices.data_snapshot"))
    except ImportError:
        logger.info("prices are not looked up without genai-prices: pip install 'resilient-llm[prices]'")
        return None


def _price(found: _ModelPrice) -> Price | None:
    """Read an entry of the catalogue; `None` for a model that is not charged for by the token."""
    parts = (found.input_mtok, found.output_mtok, found.cache_read_mtok)
    steps = {tier.start for part in parts for tier in getattr(part, "tiers", ())}
    if found.input_mtok is None and found.output_mtok is None:
        return None
    price = _at(parts, 0)
    above = [(least, _at(parts, least + 1)) for least in sorted(steps) if least > 0]
    return Price(input=price.input, output=price.output, cached=price.cached, above=above)


def _at(parts: tuple[object, object, object], input_tokens: int) -> Price:
    """Give what each part costs at so many tokens of input; what has no price costs nothing."""
    paid, made, cached = (_amount(part, input_tokens) for part in parts)
    return Price(input=paid or 0.0, output=made or 0.0, cached=cached)


def _amount(part: object, input_tokens: int) -> float | None:
    tiers = getattr(part, "tiers", None)
    if tiers is not None:
        tiered = cast("_Tiered", part)
        reached = [tier.price for tier in tiered.tiers if input_tokens > tier.start]
        part = reached[-1] if reached else tiered.base
    if part is None:
        return None
    amount = float(cast("float", part))
    return amount if math.isfinite(amount) and amount >= 0 else None
