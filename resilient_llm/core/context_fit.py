"""Which messages of a conversation may go when it has grown too long, and which of them have to.

Knows what a message is (an instruction, a question, an answer, the result of a tool) and how many tokens it has,
never what it says or how a provider writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Kind", "Message", "removable", "trim"]


class Kind(Enum):
    """Say what a message is."""

    FIXED = "fixed"
    """Instructions, and whatever else has to stay where it is."""
    QUESTION = "question"
    """Something a user says; an exchange begins with it."""
    ANSWER = "answer"
    """Something the model says: text, thoughts, calls of tools."""
    RESULT = "result"
    """What tools gave back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Describe one message: what it is, its tokens, the calls of tools in it and those it has the results of."""

    kind: Kind
    tokens: int = 0
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    asks: bool = False
    """Of a result: whether the user says something beside it."""


def trim(messages: Sequence[Message], *, excess: int, granularity: int = 0) -> list[int]:
    """Give the indexes of the messages to remove, in order, so that at least `excess` tokens go.

    The oldest go first, as `removable` says; when that is not enough, all that it gives go. With `granularity` the
    tokens that go are rounded up to a multiple of it where there are as many: then what is left begins with the
    same message for several exchanges in a row, and a provider's prompt cache finds it again. Nothing goes when
    there is no excess. Linear in the number of messages.
    """
    if excess <= 0:
        return []
    wanted = math.ceil(excess / granularity) * granularity if granularity > 0 else excess
    removed: list[int] = []
    for unit in removable(messages):
        removed += unit
        wanted -= sum(messages[index].tokens for index in unit)
        if wanted <= 0:
            break
    return sorted(removed)


def removable(messages: Sequence[Message]) -> Iterator[list[int]]:
    """Give what may go, the oldest first: indexes of messages that go together.

    First whole exchanges, each a question with all that came of it, so that what is left still begins with a
    question; then, within the last exchange, its steps: calls of tools with their results. What stays in any case
    is what is fixed, the question of the last exchange, the last thing a user said and the last step. A result in
    one exchange or step of a call in another binds the two together.
    """
    groups = _exchanges(messages)
    last_said = max((index for index, message in enumerate(messages) if _says(message)), default=-1)
    if groups:
        *earlier, last = groups
        question, steps = _steps(messages, last)
        groups = [*earlier, *steps]
        kept = {len(groups) - 1} if steps else set[int]()
        kept |= {
            number for number, group in enumerate(groups) if number >= len(earlier) and last_said in group
        }
        groups.append(question)
        kept.add(len(groups) - 1)
        yield from _bound(messages, groups, kept)


def _says(message: Message) -> bool:
    """Tell whether the user says something in a message."""
    return message.kind is Kind.QUESTION or (message.kind is Kind.RESULT and message.asks)


def _exchanges(messages: Sequence[Message]) -> list[list[int]]:
    """Split at the questions; what comes before the first one is an exchange, too. Questions in a row are one."""
    groups: list[list[int]] = []
    asking = False
    for index, message in enumerate(messages):
        if message.kind is Kind.FIXED:
            continue
        question = message.kind is Kind.QUESTION
        if not groups or (question and not asking):
            groups.append([])
        groups[-1].append(index)
        asking = question
    return groups


def _steps(messages: Sequence[Message], exchange: list[int]) -> tuple[list[int], list[list[int]]]:
    """Take an exchange apart: its question, and its steps, of which each begins with an answer after results."""
    question: list[int] = []
    steps: list[list[int]] = []
    before = Kind.QUESTION
    for index in exchange:
        kind = messages[index].kind
        if kind is Kind.QUESTION:
            question.append(index)
        else:
            if not steps or (kind is Kind.ANSWER and before is Kind.RESULT):
                steps.append([])
            steps[-1].append(index)
        before = kind
    return question, steps


def _bound(messages: Sequence[Message], groups: list[list[int]], kept: set[int]) -> Iterator[list[int]]:
    """Join groups that calls and their results bind together, and give those with nothing in them that is kept."""
    leader = list(range(len(groups)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    group_of = {index: number for number, group in enumerate(groups) for index in group}
    called: dict[str, int] = {}  # the latest call of that name: some models count anew in each exchange
    for index in sorted(group_of):
        number = group_of[index]
        for name in messages[index].results:
            if name in called:
                one, other = find(called[name]), find(number)
                leader[max(one, other)] = min(one, other)
        for name in messages[index].calls:
            called[name] = number

    kept_leaders = {find(number) for number in kept}
    joined: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        joined.setdefault(find(number), []).extend(group)
    for number, group in joined.items():
        if number not in kept_leaders:
            yield group
