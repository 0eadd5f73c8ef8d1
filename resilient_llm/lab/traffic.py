"""Who calls, when, and what for: arrivals with a tenant and a maker of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Literal, TypeAlias

from resilient_llm._options import (
    at_least,
    function,
    instance_of,
    is_number,
    label,
    names,
    number,
    offers,
    one_of,
    seconds,
)
from resilient_llm.errors import ConfigurationError
from resilient_llm.lab.arrivals import Arrivals, ClosedLoop
from resilient_llm.lab.distributions import Amount, amount, distribution
from resilient_llm.lab.network import URL
from resilient_llm.message import Headers, Request

__all__ = ["Chat", "MakeRequest", "Traffic"]

MakeRequest: TypeAlias = Callable[[Random], Request]
"""Makes the request of the next call."""

_PATHS = {"openai": "/chat/completions", "anthropic": "/messages"}
_CHARACTERS = 4  # of a token, as upstreams count prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Make chat requests.

    - `model`: what they ask for, or several with their weights.
    - `prompt_tokens`, `max_tokens`: their sizes; without `max_tokens` replies are as long as the upstream makes them.
    - `stream_ratio`: the share that wants a stream.
    - `questions`: how many different prompts there are; None: no two are alike.
    - `system_tokens`: how many of the tokens of every prompt are the same, in a system prompt before the rest.
    - `url`, `api`, `key`: where they go, in which shape, and with whose credential.
    - `fields`: more fields of the body.
    """

    model: str | Mapping[str, float] = field(default="gpt-4o", hash=False)
    prompt_tokens: Amount = 100
    max_tokens: Amount | None = None
    stream_ratio: float = 0.0
    questions: int | None = None
    system_tokens: int = 0
    url: str = URL
    api: Literal["openai", "anthropic"] = "openai"
    key: str = "key"
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        self._check_models()
        amount(prompt_tokens=self.prompt_tokens)
        amount(none=True, max_tokens=self.max_tokens)
        number(0, 1, stream_ratio=self.stream_ratio)
        if self.questions is not None:
            at_least(1, questions=self.questions)
        at_least(0, system_tokens=self.system_tokens)
        one_of(_PATHS, api=self.api)
        label(url=self.url, key=self.key)
        if not self.key.isascii() or not self.key.isprintable():
            raise ConfigurationError(f"key={self.key!r}: allowed are printable ASCII characters")
        instance_of(Mapping, fields=self.fields)
        names(fields=list(self.fields))

    def _check_models(self) -> None:
        if isinstance(self.model, str) and self.model:
            return
        weights = self.model.values() if isinstance(self.model, Mapping) else ()
        if (
            not all(is_number(weight) and weight >= 0 for weight in weights)
            or not 0 < sum(weights) < math.inf
        ):
            raise ConfigurationError(
                f"model={self.model!r}: allowed are names of models, and mappings of these to weights"
            )
        names(model=list(self.model))

    def __call__(self, rng: Random) -> Request:
        """Make one."""
        body: dict[str, object] = {"model": self._model(rng)}
        if self.stream_ratio and rng.random() < self.stream_ratio:
            body["stream"] = True
            if self.api == "openai":
                body["stream_options"] = {"include_usage": True}
        if self.max_tokens is not None:
            body["max_tokens"] = max(1, round(distribution(self.max_tokens).draw(rng)))
        elif self.api == "anthropic":
            body["max_tokens"] = 4096
        question = rng.getrandbits(32) if self.questions is None else rng.randrange(self.questions)
        sizes = rng if self.questions is None else Random(question)  # the same question, the same prompt
        tokens = max(0, round(distribution(self.prompt_tokens).draw(sizes)) - self.system_tokens)
        messages = [{"role": "user", "content": f"{question:08x}".ljust(_CHARACTERS * tokens, ".")}]
        if self.system_tokens:
            system = "." * (_CHARACTERS * self.system_tokens)
            if self.api == "anthropic":
                body["system"] = system
            else:
                messages.insert(0, {"role": "system", "content": system})
        body["messages"] = messages
        body.update(self.fields)
        url = self.url.rstrip("/") + _PATHS[self.api]
        return Request("POST", url, _headers(self.api, self.key), json.dumps(body).encode())

    def _model(self, rng: Random) -> str:
        if isinstance(self.model, str):
            return self.model
        return rng.choices(list(self.model), list(self.model.values()))[0]


@lru_cache(maxsize=256)
def _headers(api: str, key: str) -> Headers:
    own = [(b"authorization", b"Bearer " + key.encode())]
    if api == "anthropic":
        own = [(b"x-api-key", key.encode()), (b"anthropic-version", b"2023-06-01")]
    return [(b"content-type", b"application/json"), *own]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls of one tenant: when they come and what each asks for, with `priority` and at most `timeout` seconds each.

    `request` makes each call's request from a `random.Random` of this traffic's own.
    """

    arrivals: Arrivals
    request: MakeRequest = Chat()
    tenant: str | None = None
    priority: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.arrivals, ClosedLoop):
            offers(("times",), "arrivals", arrivals=self.arrivals)
        function(request=self.request)
        if self.tenant is not None:
            label(tenant=self.tenant)
        if not isinstance(self.priority, int) or not is_number(self.priority):
            raise ConfigurationError(f"priority={self.priority!r}: allowed are whole numbers")
        if self.timeout is not None:
            seconds(zero=True, timeout=self.timeout)
