"""How many tokens a call will use, before it is sent: an estimate that limits reserve and settle later.

Reads a request's JSON whatever its dialect. What is done with the number must not enter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from resilient_llm._options import at_least, label, number
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies._hooks import hook_failed, hook_gave

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import JSONObject

__all__ = [
    "MOST_TOKENS",
    "Estimate",
    "TokenEstimate",
    "amount",
    "estimate_once",
    "forget_estimates",
    "has_output",
    "output_limit",
    "prompt_tokens",
]

Estimate: TypeAlias = Callable[["Call"], float]
"""Say how many tokens a call will use."""

MOST_TOKENS = 1e12
"""More than any call has. What exceeds it counts as this: callers may write any number of digits, floats end."""

_PROMPT = frozenset(
    {
        "messages",
        "prompt",
        "input",
        "instructions",
        "system",
        "tools",
        "functions",
        "contents",  # Gemini
        "content",
        "requests",
        "systemInstruction",
        "system_instruction",
    }
)
_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens")
_CHOICES = ("n", "candidateCount")
_NO_OUTPUT = frozenset({"embeddings", "moderation", "rerank", "count_tokens", "speech"})
_ATTACHMENTS = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "audio",
        "input_audio",
        "file",
        "input_file",
        "document",
        "video_url",
    }
)
_INLINE = frozenset({"inlineData", "inline_data", "fileData", "file_data"})  # Gemini's parts have no type
_SAMPLE = 16_384  # characters of one text that are encoded; the rest of a longer one is taken to be like them


@dataclass(frozen=True, kw_only=True)
class TokenEstimate:
    """Estimate the tokens of a call: those of its prompt, and all that it allows the answer to have.

    The prompt is everything said in it, keys of messages and tools included, which stand for what a provider adds to
    each: UTF-8 bytes divided by `bytes_per_token`, or counted by the tiktoken `encoding` where one is given (extra
    `tiktoken`, loaded now; it may fetch the encoding from the network). An image, sound or file counts as
    `attachment_tokens`. Token ids are counted as they are. The answer is what the request sets as its most, times the
    choices asked for, or `output_tokens` where it sets nothing; embeddings have none. A request without any prompt,
    such as a list of models, has no tokens.

    Raises `ConfigurationError` for options that cannot work, and `ImportError` when tiktoken is not installed.
    """

    bytes_per_token: float = 4.0
    output_tokens: int = 500
    attachment_tokens: int = 1_000
    encoding: str | None = None
    _count: Callable[[str], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least(0, output_tokens=self.output_tokens, attachment_tokens=self.attachment_tokens)
        number(0, math.inf, inside=True, bytes_per_token=self.bytes_per_token)
        if self.encoding is not None:
            label(encoding=self.encoding)
        count = self._by_bytes if self.encoding is None else _tiktoken_counter(self.encoding)
        object.__setattr__(self, "_count", count)

    def __call__(self, call: Call) -> int:
        """Give the estimate for a call."""
        body = call.request.json
        prompt = self.of(body)
        if not prompt or not has_output(call):
            return prompt
        return min(prompt + self._output(body), int(MOST_TOKENS))

    def prompt(self, call: Call) -> int:
        """Give the part of the estimate that is the prompt's."""
        return self.of(call.request.json)

    def of(self, body: JSONObject) -> int:
        """Give the tokens of the prompt in the body of a request, or in a part of one."""
        texts, ids, attachments = _said_in([value for name, value in body.items() if name in _PROMPT])
        if not (texts or ids or attachments):
            return 0
        count = self._count("\n".join(texts)) + ids
        return math.ceil(min(count + min(attachments * self.attachment_tokens, MOST_TOKENS), MOST_TOKENS))

    def _output(self, body: JSONObject) -> int:
        places = _places(body)
        return _first(places, _OUTPUT_LIMITS, self.output_tokens) * max(1, _first(places, _CHOICES, 1))

    def _by_bytes(self, text: str) -> float:
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return size / self.bytes_per_token


def has_output(call: Call) -> bool:
    """Tell whether tokens are written in answer to a call."""
    return call.operation not in _NO_OUTPUT


def output_limit(body: JSONObject, otherwise: int) -> int:
    """Give the most tokens that a request lets an answer have; `otherwise` where it sets nothing."""
    return _first(_places(body), _OUTPUT_LIMITS, otherwise)


def _said_in(parts: list[object]) -> tuple[list[str], int, int]:
    """Give what is said in parts of a JSON document, at any depth: texts, and the numbers of ids and attachments."""
    texts: list[str] = []
    ids = attachments = 0  # other values than texts count as ids: they take about one token
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            if _is_attachment(part):
                attachments += 1
            else:
                texts.extend(part)
                parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
        elif part is not None:
            ids += 1
    return texts, ids, attachments


_DEFAULT = TokenEstimate()


def estimate_once(call: Call, estimate: Estimate) -> float:
    """Give the estimate for a call, made when first asked for and kept for its later attempts."""
    tokens = call.tokens
    if tokens is None:
        parent = call.parent
        if parent is not None and parent.request is not call.request:
            parent = None
        if parent is None or parent.tokens is None:
            tokens = call.tokens = amount("estimate", estimate, call, _DEFAULT)
            call.estimated_by = estimate
            if parent is not None:
                parent.tokens, parent.estimated_by = tokens, estimate
            return tokens
    elif call.estimated_by is estimate:
        return tokens
    return _another_estimate(call, estimate)


def _another_estimate(call: Call, estimate: Estimate) -> float:
    """Give the estimate for a call that others have estimated: each policy goes by its own."""
    owner = call
    if call.parent is not None and call.parent.request is call.request:
        owner = call.parent
    for one in (call, owner):
        for other, tokens in ((one.estimated_by, one.tokens), *one.other_estimates):
            if tokens is not None and (
                other is estimate or (other == estimate and type(other) is TokenEstimate)
            ):
                return tokens
    tokens = amount("estimate", estimate, call, _DEFAULT)
    owner.other_estimates = (*owner.other_estimates, (estimate, tokens))
    return tokens


def forget_estimates(call: Call) -> None:
    """Have a call, whose prompt has been changed, estimated anew."""
    call.tokens, call.estimated_by, call.other_estimates = None, None, ()


def prompt_tokens(call: Call, estimate: Estimate) -> float:
    """Give the prompt's part of an estimate; 0 where an estimate of the application's own does not tell it."""
    if not isinstance(estimate, TokenEstimate):
        return 0.0
    return amount("estimate", estimate.prompt, call, otherwise=_DEFAULT.prompt)


def amount(option: str, ask: Estimate, call: Call, otherwise: Estimate) -> float:
    """Ask a user's function for a number, at most `MOST_TOKENS`.

    One that fails, or gives no finite number from 0, must not break a call.
    """
    try:
        number = float(ask(call))
        if 0 <= number <= MOST_TOKENS:
            return number
        if MOST_TOKENS < number < math.inf:
            return MOST_TOKENS
        hook_gave(option, ask, number, "finite numbers from 0")
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
        hook_failed(option, ask, error)
    return otherwise(call)


def _is_attachment(part: Mapping[str, object]) -> bool:
    kind = part.get("type")
    if isinstance(kind, str) and kind in _ATTACHMENTS:
        source = part.get("source")
        return not (isinstance(source, Mapping) and source.get("type") in ("text", "content"))
    return not _INLINE.isdisjoint(part)


def _places(body: JSONObject) -> tuple[JSONObject, ...]:
    config = body.get("generationConfig")
    return (body, config) if isinstance(config, Mapping) else (body,)


def _first(places: tuple[Mapping[str, object], ...], names: tuple[str, ...], otherwise: int) -> int:
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
    return otherwise


def _tiktoken_counter(name: str) -> Callable[[str], float]:
    try:
        tiktoken = import_module("tiktoken")
    except ImportError as error:
        raise ImportError("encoding= needs tiktoken: pip install 'resilient-llm[tiktoken]'") from error
    try:
        encoding = tiktoken.get_encoding(name)
    except ValueError as error:
        raise ConfigurationError(f"encoding={name!r}: {error}") from error

    def count(text: str) -> float:
        sample = text[:_SAMPLE]  # encoding megabytes would stop the event loop
        tokens = len(encoding.encode(sample, disallowed_special=()))
        return tokens * len(text) / len(sample) if sample else 0

    return count
