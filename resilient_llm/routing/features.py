"""What a rule can see of a request without a model: the last question, sizes, and what comes along.

Reads bodies of every dialect, a bounded part of each. What follows from any of it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from resilient_llm.core.context_fit import Kind
from resilient_llm.policies._conversation import describe, find
from resilient_llm.policies.tokens import output_limit

if TYPE_CHECKING:
    from resilient_llm.message import JSONObject

__all__ = ["Features", "features_of"]

_MOST_VALUES = 20_000
"""Values of a body that are looked at; the latest messages come first."""
_MOST_MESSAGES = 1_000
"""Messages that are looked at, from the last one back, for the last question."""
_SAMPLE = 8_192
"""Characters of a long question that are looked at, at its beginning and again at its end."""
_BYTES_PER_TOKEN = 4.0

_PROMPT = (
    "system",
    "instructions",
    "systemInstruction",
    "system_instruction",
    "prompt",
    "messages",
    "contents",
    "input",
)
_IMAGES = frozenset({"image", "image_url", "input_image", "video", "video_url"})
_SOUNDS = frozenset({"audio", "input_audio", "audio_url"})
_FILES = frozenset({"document", "file", "input_file"})
_INLINE = ("inlineData", "inline_data", "fileData", "file_data")
_KEYED = ("image", "video", "document")  # Bedrock
_UNTYPED = frozenset({*_INLINE, *_KEYED})
_MIME_TYPES = ("mimeType", "mime_type")
_HIGH = frozenset({"high", "xhigh", "max"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Describe a request. Sizes are tokens, by a quarter of the bytes in UTF-8."""

    question: str = ""
    """The last thing the user says; of a long one the beginning and the end."""
    question_size: float = 0.0
    prompt_size: float = 0.0
    output_tokens: int = 0
    """The most that the answer may have; 0 where nothing is set."""
    tools: int = 0
    images: int = 0
    """Pictures and films."""
    audio: int = 0
    files: int = 0
    code: bool = False
    """Whether the question has a block of code in it."""
    schema: bool = False
    """Whether the answer has to be JSON."""
    thinking: bool = False
    """Whether the caller asks for much reasoning."""


def features_of(body: JSONObject) -> Features:
    """Describe the body of a request in any dialect. Never raises; bounded work, however long the prompt."""
    seen = _Seen()
    seen.look([body[name] for name in _PROMPT if name in body])
    texts = list(_question(body))
    question = "\n".join(texts)
    if len(question) > 2 * _SAMPLE:
        question = f"{question[:_SAMPLE]}\n{question[-_SAMPLE:]}"
    return Features(
        question=question,
        question_size=sum(map(_size, texts)),
        prompt_size=seen.size,
        output_tokens=output_limit(body, 0),
        tools=_tools(body),
        images=seen.images,
        audio=seen.audio,
        files=seen.files,
        code="```" in question,
        schema=_wants_json(body),
        thinking=_wants_thought(body),
    )


class _Seen:
    """Count what there is in a part of a body."""

    def __init__(self) -> None:
        self.size = 0.0
        self.images = self.audio = self.files = 0

    def look(self, values: list[object]) -> None:
        left = _MOST_VALUES
        while values and left:
            left -= 1
            value = values.pop()
            if isinstance(value, str):
                self.size += _size(value)
            elif isinstance(value, list):
                values.extend(value[-left:])
            elif isinstance(value, dict) and not self._attached(
                value
            ):  # a dict: parsed JSON has no other mapping
                values.extend(islice(value.values(), left))

    def _attached(self, part: JSONObject) -> bool:
        """Count a part that is no text; what it carries is not looked at."""
        kind = part.get("type")
        if not isinstance(kind, str):
            if _UNTYPED.isdisjoint(part):
                return False
            kind = next((_mime_type(part[name]) for name in _INLINE if name in part), "") or next(
                (name for name in _KEYED if isinstance(part.get(name), Mapping)), ""
            )
        kind = kind.partition("/")[0]
        if kind in _IMAGES:
            self.images += 1
        elif kind in _SOUNDS:
            self.audio += 1
        elif kind in _FILES or kind == "application":
            self.files += 1
        else:
            return False
        return True


def _mime_type(data: object) -> str:
    if not isinstance(data, Mapping):
        return ""
    found = next((data[name] for name in _MIME_TYPES if name in data), None)
    return found if isinstance(found, str) and "/" in found else "application/octet-stream"


def _size(text: str) -> float:
    if text.isascii():
        return len(text) / _BYTES_PER_TOKEN
    sample = text[:_SAMPLE]
    return len(sample.encode("utf-8", "surrogatepass")) * len(text) / len(sample) / _BYTES_PER_TOKEN


def _question(body: JSONObject) -> Iterator[str]:
    """Give the texts of the last thing the user says."""
    found = find(body)
    if found is None:
        for name in ("input", "prompt"):
            yield from _texts(body.get(name))
        return
    for message in found[1][: -_MOST_MESSAGES - 1 : -1]:
        said = describe(message, 0)
        if isinstance(message, Mapping) and (said.kind is Kind.QUESTION or said.asks):
            yield from _texts(message.get("content", message.get("parts")))
            return


def _texts(said: object) -> Iterator[str]:
    if isinstance(said, str):
        yield said
    elif isinstance(said, list):
        for part in said[-_MOST_MESSAGES:]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _tools(body: JSONObject) -> int:
    count = 0
    for name in ("tools", "functions"):
        tools = body.get(name)
        for tool in tools[:_MOST_MESSAGES] if isinstance(tools, list) else ():
            declared = _first(tool, "functionDeclarations", "function_declarations")
            count += len(declared) if isinstance(declared, list) else 1
    return count


def _wants_json(body: JSONObject) -> bool:
    config = body.get("generationConfig")
    shapes = (
        body.get("response_format"),
        body.get("output_format"),
        _first(body.get("text"), "format"),
        _first(body.get("output_config"), "format"),
    )
    return any(str(_first(shape, "type")).startswith("json") for shape in shapes) or (
        _first(config, "responseSchema", "responseJsonSchema", "response_schema") is not None
        or _first(config, "responseMimeType", "response_mime_type") == "application/json"
    )


def _wants_thought(body: JSONObject) -> bool:
    config = _first(body.get("generationConfig"), "thinkingConfig")
    efforts = (
        body.get("reasoning_effort"),
        _first(body.get("reasoning"), "effort"),
        _first(body.get("output_config"), "effort"),
        _first(config, "thinkingLevel"),
    )
    budget = _first(config, "thinkingBudget")
    return (
        any(isinstance(effort, str) and effort.lower() in _HIGH for effort in efforts)
        or _first(body.get("thinking"), "type") == "enabled"
        or (isinstance(budget, int) and budget > 0)
    )


def _first(value: object, *names: str) -> object:
    """Give the first of the named members that there is."""
    if not isinstance(value, Mapping):
        return None
    return next((value[name] for name in names if name in value), None)
