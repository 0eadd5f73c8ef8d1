"""What the fake provider says, whatever the API: the reply, and what a dialect has to be able to say."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ._fault import Fault
from ._rate_limits import Level, Refusal

JSONObject: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply of a model, complete: the provider knows it before the first token leaves."""

    number: int
    model: str
    created: int
    tokens: tuple[str, ...]
    prompt_tokens: int
    truncated: bool
    """Whether the caller's maximum of tokens cut it short."""
    finish_reason: str | None
    """Overrides the dialect's own."""
    request: JSONObject

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.tokens)


class Dialect(Protocol):
    """One API: what its requests ask for, and how its replies, events and errors look.

    A stream is `opening`, then `token` for each, then `closing`, then `terminal`.
    """

    name: str
    streams: bool
    request_id_header: str

    def prompt(self, request: JSONObject) -> object:
        """Return those parts of the request that are billed as prompt."""

    def max_tokens(self, request: JSONObject) -> int | None:
        """Return the caller's maximum of tokens to generate."""

    def message(self, reply: Reply) -> JSONObject:
        """Return the body of a reply that is not streamed."""

    def opening(self, reply: Reply) -> list[bytes]:
        """Return the events before the first token."""

    def token(self, reply: Reply, index: int) -> bytes:
        """Return the event of one token."""

    def closing(self, reply: Reply) -> list[bytes]:
        """Return the events that say why the reply ended, and what it used."""

    def terminal(self, reply: Reply) -> bytes:
        """Return the event after which nothing comes."""

    def ping(self) -> bytes:
        """Return a keep-alive."""

    def error(self, fault: Fault, request_id: str) -> JSONObject:
        """Return the body of an error response for the fault's status, message, code and type."""

    def error_event(self, error: JSONObject, tokens_sent: int) -> bytes:
        """Return the event that an error body comes as within a stream."""

    def refusal(self, model: str, refusal: Refusal) -> Fault:
        """Return the answer to a request over the rate limits."""

    def rate_limit_headers(self, levels: Sequence[Level], wall_clock: float) -> dict[str, str]:
        """Return the headers that report the rate limits' levels."""


TOO_MANY_REQUESTS = 429
SERVER_ERROR = 500


def whole_seconds(wait: float) -> int:
    """Round a wait up to what `retry-after` can say: whole seconds, at least 1."""
    return max(1, math.ceil(wait))


def encode(value: object) -> bytes:
    """Return `value` as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
        errors="backslashreplace"  # half of a surrogate pair, which JSON writes just so
    )


def event(data: JSONObject, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(data) + b"\n\n"


def tokens_of(text: str) -> tuple[str, ...]:
    """Split a text into the provider's tokens: words with the space before them."""
    return tuple(re.findall(r"\s*\S+|\s+", text))


def count_prompt(prompt: object) -> int:
    """Estimate a prompt's tokens: a quarter of its characters, rounded up, and at least 1."""
    return max(1, -(-sum(map(len, _texts(prompt))) // 4))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(value.get("content"))
        yield from _texts(value.get("text"))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def positive_int(request: JSONObject, *names: str) -> int | None:
    """Return the first of these fields that holds a positive integer."""
    for name in names:
        value = request.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None
