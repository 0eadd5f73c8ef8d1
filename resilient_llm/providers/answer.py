"""What is learnt of an answer while it is read, whatever dialect it is written in.

Names, numbers and why it ended. The text itself is counted and, unless asked for, not kept. The shapes in
which dialects write all this must not enter here.
"""

from __future__ import annotations

import json
from enum import Enum

from resilient_llm.message import JSONObject
from resilient_llm.outcome import Usage

__all__ = ["CHARACTERS_PER_TOKEN", "MOST", "Answer", "EventKind", "count", "objects", "written"]

CHARACTERS_PER_TOKEN = 4
"""The rule of thumb for estimates: about right for English, too many characters for Chinese or code."""

MOST = 1_000_000_000
"""More than any one reply can have used; what says more counts nothing, and nobody must have to pay for it."""

_UNKNOWN = (None, None, None, None)


class EventKind(Enum):
    """Say what one event of a stream is."""

    CONTENT = "content"
    """Something the model made: text, thinking, a refusal, a call of a tool, sound, a picture."""
    META = "meta"
    """Anything else: who speaks, a ping, a reason to finish, what a filter thinks of the prompt."""
    USAGE = "usage"
    """A chunk of its own for usage, which a caller who did not ask for it (`include_usage`) does not expect."""
    END = "end"
    """The mark after which nothing comes: `[DONE]`, `message_stop`, `response.completed` ..."""
    ERROR = "error"
    """The end too, and a bad one."""
    MALFORMED = "malformed"
    """Not what the dialect's events are written in."""


class Answer:
    """Hold what a reply says about itself.

    `model` is the one that really answered. Token counts are those reported last, `None` while unknown;
    `input_tokens` includes what came from a cache, `output_tokens` what was thinking. `sequence` numbers the
    last event where a dialect does so. With `keep_text` the text is kept too.
    """

    __slots__ = (
        "_begun",
        "_finished",
        "_text",
        "_text_only",
        "cached_tokens",
        "characters",
        "id",
        "input_tokens",
        "model",
        "output_tokens",
        "problem",
        "reasoning_tokens",
        "sequence",
    )

    def __init__(self, *, keep_text: bool = False) -> None:
        self.model: str | None = None
        self.id: str | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.characters = 0
        """How many characters of text, thinking and arguments there were."""
        self.problem: JSONObject | None = None
        """An error object for what is a failure although its shape is an answer's."""
        self.sequence: int | None = None
        self._begun: set[int] = set()
        self._finished: dict[int, str] = {}
        self._text: list[str] | None = [] if keep_text else None
        self._text_only = True

    def identify(self, *, model: object = None, id: object = None) -> None:  # noqa: A002 - it is called so
        """Take names; the first that is not empty counts."""
        if self.model is None and isinstance(model, str) and model:
            self.model = model
        if self.id is None and isinstance(id, str) and id:
            self.id = id

    def count_tokens(
        self,
        *,
        input: int | None = None,  # noqa: A002 - as in Usage
        output: int | None = None,
        cached: int | None = None,
        reasoning: int | None = None,
    ) -> None:
        """Take counts; each that is known replaces an earlier one."""
        if input is not None:
            self.input_tokens = input
        if output is not None:
            self.output_tokens = output
        if cached is not None:
            self.cached_tokens = cached
        if reasoning is not None:
            self.reasoning_tokens = reasoning

    def begin(self, index: int = 0) -> None:
        """Note that the alternative `index` has begun, and will have to finish."""
        self._begun.add(index)

    def finish(self, reason: object, index: int = 0) -> None:
        """Take the reason why an alternative ended; `None` and the like say that it has not."""
        if isinstance(reason, str) and reason:
            self._finished.setdefault(index, reason)

    def say(self, text: str, index: int = 0) -> None:
        """Take a piece of the answer's text."""
        self.characters += len(text)
        if self._text is not None:
            self._text.append(text)
            self._text_only = self._text_only and index == 0

    def think(self, text: str) -> None:
        """Take a piece of thinking, which is no part of the answer's text."""
        self.characters += len(text)

    def do(self, text: str = "") -> None:
        """Take whatever else a model makes, with as much of it as is text."""
        self.characters += len(text)
        self._text_only = False

    @property
    def text(self) -> str | None:
        """Give the text so far; `None` when it was not kept, or is not all that was said."""
        return "".join(self._text) if self._text is not None and self._text_only else None

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Give the reasons, in the provider's words, in the order of the alternatives."""
        finished = self._finished
        if len(finished) == 1:
            return tuple(finished.values())
        return tuple([finished[index] for index in sorted(finished)])

    @property
    def finished(self) -> bool:
        """Tell whether there is an answer and a reason to finish for every alternative of it."""
        return bool(self._finished) and self._begun <= self._finished.keys()

    @property
    def usage(self) -> Usage | None:
        """Give what was reported, or `None`."""
        counts = (self.input_tokens, self.output_tokens, self.cached_tokens, self.reasoning_tokens)
        if counts == _UNKNOWN:
            return None
        return Usage(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )

    def estimate(self) -> Usage | None:
        """Give what was used so far, by the length of the text where that says more than the report does.

        `None` when nothing is known at all; a count that is unknown stays so.
        """
        written = -(-self.characters // CHARACTERS_PER_TOKEN) or None
        counts = [number for number in (self.output_tokens, written) if number is not None]
        if not counts and self.usage is None:
            return None
        return Usage(
            input_tokens=self.input_tokens,
            output_tokens=max(counts) if counts else None,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reasoning_tokens,
            estimated=True,
        )


def objects(value: object) -> list[JSONObject]:
    """Give the JSON objects in a list; none when it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def count(holder: object, name: str) -> int | None:
    """Give the whole number from 0 to `MOST` that a JSON object has under a name, or `None`."""
    if not isinstance(holder, dict):
        return None
    number = holder.get(name)
    return number if type(number) is int and 0 <= number <= MOST else None  # a bool is none


def written(value: object) -> str:
    """Give the JSON that a model wrote for `value`; none when there is nothing in it, or no end to it."""
    try:
        return json.dumps(value) if value else ""
    except (ValueError, RecursionError):
        return ""
