"""Which messages go: by example, and by what has to hold of any conversation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.context_fit import Kind, Message, removable, trim

KINDS = {"s": Kind.FIXED, "u": Kind.QUESTION, "a": Kind.ANSWER, "r": Kind.RESULT}


def said(text: str) -> list[Message]:
    """Read a conversation: s system, u user, a answer, r result, r+ one with words of the user; `:1` the call."""
    messages = []
    for word in text.split():
        what, _, call = word.partition(":")
        messages.append(
            Message(
                kind=KINDS[what[0]],
                tokens=10,
                calls=(call,) if call and what == "a" else (),
                results=(call,) if call and what != "a" else (),
                asks=what == "r+",
            )
        )
    return messages


@pytest.mark.parametrize(
    ("conversation", "units"),
    [
        ("", []),
        ("s", []),
        ("s u", []),
        ("s u a", []),
        ("s u a u", [[1, 2]]),
        ("u a s u a u", [[0, 1], [3, 4]]),  # instructions stay wherever they are
        ("a u a u", [[0], [1, 2]]),  # a greeting
        ("u u a u", [[0, 1, 2]]),  # who writes twice has one turn
        ("u a u u", [[0, 1]]),
        ("u a:1 r:1 a u", [[0, 1, 2, 3]]),
        # an agent at work: what it has done since it was asked goes last, and the latest step stays
        ("u a u a:1 r:1 a:2 r:2", [[0, 1], [3, 4]]),
        ("u a:1 a:2 r:1 r:2 a:3 r:3 a:4 r:4", [[1, 2, 3, 4], [5, 6]]),
        ("u a:1 r:1 a", [[1, 2]]),
        ("u a r a", [[1, 2]]),  # no ids: what follows each other belongs together
        ("a:1 r:1 a:2 r:2", [[0, 1]]),
        ("r:1 a:2 r:2", [[0]]),
        # what the user said last stays, also beside a result
        ("u a:1 r+:1 a:2 r:2 a:3 r:3", [[3, 4]]),
        ("u a:1 r+:1 a:2 r+:2 a:3 r:3", [[1, 2]]),
        # a result that comes late binds exchanges together
        ("u a:1 u r:1 a u", [[0, 1, 2, 3, 4]]),
        ("u a:1 u a u r:1 a u", [[0, 1, 4, 5, 6], [2, 3]]),
        ("u a:1 u r:1 a", [[0, 1, 3]]),
        ("u a:1 u r:1", []),
        ("u a:1 r:1 a:2 r:2 a:3 r:1", [[3, 4]]),
        # models that count their calls anew each time
        ("u a:1 r:1 u a:1 r:1 u a:1 r:1", [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_what_may_go_and_what_goes_together(conversation: str, units: list[list[int]]) -> None:
    assert list(removable(said(conversation))) == units


def test_no_more_goes_than_has_to() -> None:
    messages = said("s u a u a u a u")
    assert trim(messages, excess=0) == []
    assert trim(messages, excess=1) == [1, 2]
    assert trim(messages, excess=20) == [1, 2]
    assert trim(messages, excess=21) == [1, 2, 3, 4]
    assert trim(messages, excess=10_000) == [1, 2, 3, 4, 5, 6]


def test_with_a_granularity_the_cut_stays_where_it_is_for_a_while() -> None:
    cuts = []
    for exchanges in range(5, 15):  # a conversation that grows by 20 tokens each time, and a window for 100
        messages = said("s " + "u a " * exchanges + "u")
        cuts.append(
            len(trim(messages, excess=sum(message.tokens for message in messages) - 100, granularity=60))
        )
    assert cuts == [6, 6, 6, 12, 12, 12, 18, 18, 18, 24]


MESSAGES = st.lists(
    st.builds(
        Message,
        kind=st.sampled_from(Kind),
        tokens=st.integers(0, 50),
        calls=st.just(()) | st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
        results=st.just(()) | st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
        asks=st.booleans(),
    ),
    max_size=12,
)


def kept(messages: list[Message], removed: list[int]) -> list[Message]:
    return [message for index, message in enumerate(messages) if index not in set(removed)]


@given(MESSAGES, st.integers(-10, 400), st.integers(0, 100))
def test_it_fits_or_nothing_more_can_go(messages: list[Message], excess: int, granularity: int) -> None:
    removed = trim(messages, excess=excess, granularity=granularity)
    assert removed == sorted(set(removed))
    gone = sum(messages[index].tokens for index in removed)
    everything = sorted(index for unit in removable(messages) for index in unit)
    assert gone >= excess or removed == everything
    if excess <= 0:
        assert removed == []


@given(MESSAGES, st.integers(1, 400))
def test_the_least_that_the_order_allows(messages: list[Message], excess: int) -> None:
    removed = trim(messages, excess=excess)
    units = list(removable(messages))
    count = next(n for n in range(len(units) + 1) if sorted(sum(units[:n], [])) == removed)  # noqa: RUF017 - few
    if count:
        assert sum(messages[index].tokens for unit in units[: count - 1] for index in unit) < excess


@given(MESSAGES)
def test_units_are_disjoint_and_leave_what_must_stay(messages: list[Message]) -> None:
    units = list(removable(messages))
    gone = [index for unit in units for index in unit]
    assert len(gone) == len(set(gone))
    assert all(unit for unit in units)
    assert all(messages[index].kind is not Kind.FIXED for index in gone)
    questions = [index for index, message in enumerate(messages) if message.kind is Kind.QUESTION]
    says = [index for index, message in enumerate(messages) if message.kind is Kind.RESULT and message.asks]
    says = sorted(questions + says)
    assert not questions or questions[-1] not in gone
    assert not says or says[-1] not in gone
    moving = [index for index, message in enumerate(messages) if message.kind is not Kind.FIXED]
    assert not moving or moving[-1] not in gone


@given(MESSAGES)
def test_no_unit_separates_a_result_from_its_call(messages: list[Message]) -> None:
    removed: set[int] = set()
    for unit in removable(messages):
        removed |= set(unit)
        latest: dict[str, int] = {}
        for index, message in enumerate(messages):
            if message.kind is Kind.FIXED:
                continue
            for name in message.results:
                if name in latest:
                    assert (latest[name] in removed) == (index in removed)
            for name in message.calls:
                latest[name] = index


@given(MESSAGES.filter(lambda messages: not any(message.calls for message in messages)))
def test_what_began_with_a_question_still_does(messages: list[Message]) -> None:
    moving = [message for message in messages if message.kind is not Kind.FIXED]
    if not moving or moving[0].kind is not Kind.QUESTION:
        return
    units = list(removable(messages))
    for count in range(len(units) + 1):
        left = kept(messages, sum(units[:count], []))  # noqa: RUF017 - few
        assert next(message for message in left if message.kind is not Kind.FIXED).kind is Kind.QUESTION


@given(MESSAGES, st.integers(0, 300), st.integers(0, 100))
def test_what_has_been_trimmed_is_left_alone(messages: list[Message], limit: int, granularity: int) -> None:
    excess = sum(message.tokens for message in messages) - limit
    left = kept(messages, trim(messages, excess=excess, granularity=granularity))
    again = trim(left, excess=sum(message.tokens for message in left) - limit, granularity=granularity)
    if sum(message.tokens for message in left) <= limit:
        assert again == []
