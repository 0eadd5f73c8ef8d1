"""Read a conversation out of the body of a request, in whichever dialect it is written.

Says of each message what kind it is and which tools it calls or answers for. What is not known stays where it is,
and nothing is decided in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from resilient_llm.core.context_fit import Kind, Message

if TYPE_CHECKING:
    from resilient_llm.message import JSONObject

__all__ = ["describe", "find"]

_PLACES = ("messages", "contents", "input")
_ANSWERS = frozenset({"assistant", "model"})
_TOOLS = frozenset({"tool", "function"})
_ITEMS = frozenset({"reasoning", "mcp_list_tools", "mcp_approval_request"})
"""What the model says in OpenAI's Responses, beside messages and what ends in `_call`."""
_CALL_PARTS = frozenset({"tool_use", "function_call"})
_RESULT_PARTS = frozenset({"tool_result", "function_result"})
_CALL_KEYS = ("functionCall", "function_call", "toolUse")  # parts without a type: Gemini, Bedrock
_RESULT_KEYS = ("functionResponse", "function_response", "toolResult")
_IDS = ("call_id", "tool_call_id", "tool_use_id", "toolUseId", "approval_request_id", "id")


def find(body: JSONObject) -> tuple[str, list[object]] | None:
    """Give the name of the member that holds the conversation, and its messages; `None` where there is none."""
    for name in _PLACES:
        messages = body.get(name)
        if isinstance(messages, list) and messages:
            return name, messages
    return None


def describe(message: object, tokens: int) -> Message:
    """Describe one message of `tokens` tokens."""
    if not isinstance(message, Mapping):
        return Message(kind=Kind.FIXED, tokens=tokens)
    role, item = message.get("role"), _word(message.get("type"))
    role = role if role is None else _word(role)
    parts = _parts(message)
    if role is None and item:
        return _describe_item(message, item, tokens)
    if role in _ANSWERS:
        calls = _ids(_objects(message.get("tool_calls"))) + _ids(_calls(parts))
        return Message(kind=Kind.ANSWER, tokens=tokens, calls=calls)
    results = list(_results(parts))
    if role in _TOOLS or (role in ("user", None) and results):
        ids = _ids([message]) + _ids(results)
        return Message(kind=Kind.RESULT, tokens=tokens, results=ids, asks=len(parts) > len(results) > 0)
    if role == "user" or (role is None and parts):
        return Message(kind=Kind.QUESTION, tokens=tokens)
    return Message(kind=Kind.FIXED, tokens=tokens)  # system, developer, and roles that nobody has told us of


def _describe_item(item: JSONObject, kind: str, tokens: int) -> Message:
    """Describe an item of OpenAI's Responses that nobody speaks."""
    if kind.endswith("_call_output") or kind == "mcp_approval_response":
        return Message(kind=Kind.RESULT, tokens=tokens, results=_ids([item]))
    if kind.endswith("_call") or kind in _ITEMS:
        return Message(kind=Kind.ANSWER, tokens=tokens, calls=_ids([item]))
    return Message(kind=Kind.FIXED, tokens=tokens)


def _parts(message: JSONObject) -> list[JSONObject]:
    return _objects(message.get("content")) or _objects(message.get("parts"))


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _objects(value: object) -> list[JSONObject]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _calls(parts: list[JSONObject]) -> Iterator[JSONObject]:
    for part in parts:
        if _word(part.get("type")) in _CALL_PARTS:
            yield part
        yield from _nested(part, _CALL_KEYS)


def _results(parts: list[JSONObject]) -> Iterator[JSONObject]:
    for part in parts:
        if _word(part.get("type")) in _RESULT_PARTS:
            yield part
        yield from _nested(part, _RESULT_KEYS)


def _nested(part: JSONObject, keys: tuple[str, ...]) -> Iterator[JSONObject]:
    for key in keys:
        inner = part.get(key)
        if isinstance(inner, Mapping):
            yield inner


def _ids(objects: Iterator[JSONObject] | list[JSONObject]) -> tuple[str, ...]:
    """Give the name that each call is known by, where it has one."""
    found = (
        next((value for name in _IDS if isinstance(value := item.get(name), str)), None) for item in objects
    )
    return tuple(name for name in found if name)
