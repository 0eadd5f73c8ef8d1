"""Elements taken out of an array in a JSON document, all else byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.json_splice import without_elements

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SPACE = st.text(alphabet=" \t\n\r", max_size=3)


def test_an_element_goes_with_what_separates_it_from_the_one_before() -> None:
    document = b'{ "a": [1 , 2,\n  {"b": "]"}, "\xc3\xa9" ] , "z": 1e2}'
    assert without_elements(document, "a", [1]) == b'{ "a": [1,\n  {"b": "]"}, "\xc3\xa9" ] , "z": 1e2}'
    assert without_elements(document, "a", [0, 2]) == b'{ "a": [2, "\xc3\xa9" ] , "z": 1e2}'
    assert without_elements(document, "a", [0, 1, 2, 3]) == b'{ "a": [ ] , "z": 1e2}'
    assert without_elements(document, "a", []) is document


def test_the_last_of_equal_names_counts_as_for_parsers() -> None:
    document = b'{"a": [1, 2], "a": [3, 4]}'
    assert without_elements(document, "a", [0]) == b'{"a": [1, 2], "a": [4]}'


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"{",
        b"{}",
        b'{"a"}',
        b'{"a": 1}',
        b'{"a": [1}',
        b'{"a": [1 2]}',
        b'{"a": [1], 2}',
        b'{"a": [1] "b": 2}',
        b'{"a": [1], "a": null}',
        b'{"a": ["\xff"]}',
        '{"a": [1]}'.encode("utf-16-le"),
    ],
)
def test_what_cannot_be_read_is_an_error(document: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        without_elements(document, "a", [0])


@pytest.mark.parametrize("indexes", [[1], [-1], [0, 5]])
def test_so_is_an_element_that_is_not_there(indexes: list[int]) -> None:
    with pytest.raises(ValueError, match="has 1 elements"):
        without_elements(b'{"a": [1]}', "a", indexes)


@st.composite
def documents(draw: st.DrawFn) -> tuple[bytes, list[Any], dict[str, Any]]:
    elements = draw(st.lists(VALUES, max_size=6))
    others = draw(st.dictionaries(st.text(max_size=4).filter(lambda name: name != "a"), VALUES, max_size=3))
    ascii_only = draw(st.booleans())

    def written(value: object) -> str:
        return draw(SPACE) + json.dumps(value, ensure_ascii=ascii_only) + draw(SPACE)

    array = "[" + (",".join(map(written, elements)) or draw(SPACE)) + "]"
    members = [f"{written(name)}:{written(value)}" for name, value in others.items()]
    members.insert(draw(st.integers(0, len(members))), f'"a"{draw(SPACE)}:{draw(SPACE)}{array}')
    document = f"{draw(SPACE)}{{{','.join(members)}}}{draw(SPACE)}"
    return document.encode("utf-8", "surrogatepass"), elements, others


@given(documents(), st.data())
def test_what_is_left_is_what_was_there(
    document: tuple[bytes, list[Any], dict[str, Any]], data: st.DataObject
) -> None:
    body, elements, others = document
    gone = data.draw(st.sets(st.sampled_from(range(len(elements))))) if elements else set()
    spliced = without_elements(body, "a", gone)
    parsed = json.loads(spliced)
    assert parsed.pop("a") == [element for index, element in enumerate(elements) if index not in gone]
    assert parsed == others
    if not gone:
        assert spliced == body
