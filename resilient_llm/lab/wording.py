"""How requests and replies of the lab look on the wire: as OpenAI's chat completions and Anthropic's messages do.

The shapes are those of `testing`. Here they are made in bulk: thousands of replies a second, which the library reads
like real ones, and of which nobody reads the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeAlias

from resilient_llm.message import Headers, Request
from resilient_llm.testing import Fault
from resilient_llm.testing._anthropic import AnthropicMessages
from resilient_llm.testing._dialect import Dialect, Reply, count_prompt, encode
from resilient_llm.testing._openai import OpenAIChat

__all__ = ["DIALECTS", "EPOCH", "Asked", "Piece", "error_body", "error_event", "pieces", "whole"]

DIALECTS: Final[Mapping[str, Dialect]] = {"/chat/completions": OpenAIChat(), "/messages": AnthropicMessages()}
"""The API of a request, by the end of its path."""

_BY_NAME: Final = {dialect.name: dialect for dialect in DIALECTS.values()}

EPOCH: Final = 1_800_000_000
"""When simulations begin, in seconds of the world's clock: in January 2027."""

Piece: TypeAlias = tuple[int, bytes]
"""An event, or a few that come together, and how many tokens of the reply it ends with."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

    dialect: Dialect
    model: str
    stream: bool
    includes_usage: bool
    prompt_tokens: int
    max_tokens: int | None
    key: str | None = field(compare=False)

    @classmethod
    def of(cls, request: Request, dialect: Dialect) -> Asked:
        """Read a request."""
        body = request.json
        options = body.get("stream_options")
        return cls(
            dialect=dialect,
            model=str(body.get("model", "")),
            stream=body.get("stream") is True,
            includes_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
            prompt_tokens=count_prompt(dialect.prompt(body)),
            max_tokens=dialect.max_tokens(body),
            key=_key(request.headers),
        )


@lru_cache(maxsize=1024)
def whole(asked: Asked, tokens: int) -> bytes:
    """Write a reply that is not streamed."""
    return encode(asked.dialect.message(_reply(asked, tokens)))


@lru_cache(maxsize=1024)
def pieces(asked: Asked, tokens: int, max_events: int) -> tuple[Piece, ...]:
    """Write a streamed reply: its first token at once, the others in at most `max_events - 1` pieces."""
    dialect = asked.dialect
    later = min(max_events - 1, tokens - 1)
    ends = [tokens] if later <= 0 else [1 + (tokens - 1) * place // later for place in range(later + 1)]
    sizes = [end - before for before, end in pairwise([0, *ends])]
    said = [_said(dialect.name, asked.model, asked.includes_usage, size) for size in sizes]
    reply = _reply(asked, tokens)
    said[0] = b"".join(dialect.opening(reply)) + said[0]
    said[-1] += b"".join(dialect.closing(reply)) + dialect.terminal(reply)
    return tuple(zip(ends, said, strict=True))


def error_body(
    dialect: Dialect,
    status: int,
    code: str | None = None,
    kind: str | None = None,
    message: str | None = None,
) -> bytes:
    """Write the body of an error response."""
    return encode(dialect.error(Fault(status=status, code=code, type=kind, message=message), "req_lab"))


def error_event(dialect: Dialect, status: int) -> bytes:
    """Write an error as an event of a stream."""
    return dialect.error_event(dialect.error(Fault(status=status), "req_lab"), 0)


@lru_cache(maxsize=4096)
def _said(dialect: str, model: str, includes_usage: bool, tokens: int) -> bytes:  # noqa: FBT001 - a cache's key
    """Write so many tokens as one event, which is the same whatever else there is in the reply."""
    speaks = _BY_NAME[dialect]
    asked = Asked(
        speaks, model, stream=True, includes_usage=includes_usage, prompt_tokens=1, max_tokens=None, key=None
    )
    return speaks.token(replace(_reply(asked, 1), tokens=("".join(_words(tokens)),)), 0)


def _reply(asked: Asked, tokens: int) -> Reply:
    return Reply(
        number=0,
        model=asked.model,
        created=EPOCH,
        tokens=_words(tokens),
        prompt_tokens=asked.prompt_tokens,
        truncated=asked.max_tokens is not None and tokens >= asked.max_tokens,
        finish_reason=None,
        request=_USAGE_ASKED if asked.includes_usage else {},
    )


_USAGE_ASKED: Final[Mapping[str, object]] = {"stream_options": {"include_usage": True}}


@lru_cache(maxsize=1024)
def _words(count: int) -> tuple[str, ...]:
    return (" word",) * count


def _key(headers: Headers) -> str | None:
    for name, value in headers:
        lower = name.lower()
        if lower == b"authorization":
            return value.decode("latin-1").removeprefix("Bearer ")
        if lower in (b"x-api-key", b"api-key"):
            return value.decode("latin-1")
    return None
