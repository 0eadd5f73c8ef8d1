"""Labels that stay few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.telemetry.labels import MAX_VALUES, OTHER, Labels


@given(st.lists(st.text(max_size=3), max_size=400))
def test_the_first_values_are_kept_and_no_more_than_a_hundred_others(values: list[str]) -> None:
    labels = Labels()
    given_back = [labels.bound("model", value) for value in values]
    distinct = list(dict.fromkeys(values))
    kept = set(distinct[:MAX_VALUES])
    assert given_back == [value if value in kept else OTHER for value in values]


def test_each_label_has_its_own() -> None:
    labels = Labels()
    for n in range(MAX_VALUES):
        labels.bound("model", f"m{n}")
    assert labels.bound("model", "one too many") == OTHER
    assert labels.bound("target", "a") == "a"


def test_a_value_without_end_is_none_of_them() -> None:
    labels = Labels()
    longest = "m" * 256
    assert labels.bound("model", longest) == longest
    for n in range(MAX_VALUES):
        assert labels.bound("model", f"{longest}{n}") == OTHER
    assert labels.bound("model", "another") == "another"
