"""Which conversation a request belongs to, as its prompt shows: the part that stays the same while it goes on.

Reads a request's JSON whatever its dialect. What is done with the hash must not enter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient_llm.message import JSONObject, Request

__all__ = ["prefix_hash"]

_NAMES = ("prompt_cache_key", "conversation")
"""With these a request of OpenAI's says itself what it has in common with others."""

_SYSTEM = (
    "instructions",
    "system",
    "systemInstruction",
    "system_instruction",
    "cachedContent",
    "cached_content",
)
_TOOLS = ("tools", "functions", "toolConfig")  # the last is Bedrock's
_TURNS = ("messages", "contents", "input", "prompt")

_INSTRUCTING = ("system", "developer")
_BEFORE_USER = (*_INSTRUCTING, "assistant", "model")
_NOT_SAID = frozenset({"type", "role", "id", "status", "cache_control", "cachePoint"})
"""What turns have beside what is said in them. Marks for a provider's cache wander through a conversation."""


def prefix_hash(request: Request, max_bytes: int = 4096) -> int:
    """Hash the system prompt, the tools, and the turns up to the first one of the user's.

    Of each of the three at most `max_bytes`. The same in every process, for every request of a conversation, and
    whether a text stands alone or in a list of parts. A `prompt_cache_key` or the name of a stored conversation
    counts instead where there is one. From 0 to below 2**64; one and the same for requests that say nothing.
    """
    body = request.json
    for name in _NAMES:
        if body.get(name):
            return _hash([_joined([body[name]], max_bytes, skip=frozenset())])
    system = [body[name] for name in _SYSTEM if name in body]
    tools = [body[name] for name in _TOOLS if name in body]
    said: list[object] = []
    for turn, role in _first_turns(body):
        (system if role in _INSTRUCTING else said).append(turn)
    return _hash([_joined(parts, max_bytes) for parts in (system, tools, said)])


def _first_turns(body: JSONObject) -> Iterator[tuple[object, object]]:
    """Give the turns up to the first one of the user's, each with its role."""
    turns = next((body[name] for name in _TURNS if body.get(name)), None)
    for turn in turns if isinstance(turns, list) else [turns]:
        role = turn.get("role") if isinstance(turn, dict) else None
        yield turn, role
        if role not in _BEFORE_USER:
            break


def _joined(parts: Iterable[object], max_bytes: int, *, skip: frozenset[str] = _NOT_SAID) -> bytes:
    said: list[bytes] = []
    left = max_bytes
    for text in _said_in(parts, skip):
        piece = text[:left].encode("utf-8", "surrogatepass")[:left]
        said.append(piece)
        left -= len(piece) + 1
        if left <= 0:
            break
    return b"\0".join(said)


def _said_in(parts: Iterable[object], skip: frozenset[str]) -> Iterator[str]:
    """Give what is said in parts of a JSON document, at any depth, in order."""
    left = [*parts][::-1]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            left.extend(reversed(part))
        elif isinstance(part, dict):
            left.extend(value for name, value in reversed(part.items()) if name not in skip)
        elif part is not None:
            yield str(part)


def _hash(texts: list[bytes]) -> int:
    digest = blake2b(digest_size=8)
    for text in texts:
        digest.update(len(text).to_bytes(4, "big"))
        digest.update(text)
    return int.from_bytes(digest.digest(), "big")
