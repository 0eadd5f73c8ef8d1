"""Outcomes and usage are plain values, whatever their `__init__` is written by."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from resilient_llm.outcome import Outcome, Scope, Usage, Verdict

USAGE = Usage(input_tokens=1, output_tokens=2, cached_tokens=3, reasoning_tokens=4, estimated=True)
OUTCOME = Outcome(
    verdict=Verdict.THROTTLED,
    scope=Scope.UPSTREAM,
    error_type="rate_limit_error",
    status=429,
    retryable=True,
    retry_after=2.5,
    retry_after_source="retry-after",
    ambiguous=True,
    usage=USAGE,
)


def test_each_field_holds_what_it_is_given_by_its_name() -> None:
    assert repr(USAGE) == (
        "Usage(input_tokens=1, output_tokens=2, cached_tokens=3, reasoning_tokens=4, estimated=True)"
    )
    assert repr(OUTCOME) == (
        "Outcome(verdict=<Verdict.THROTTLED: 'throttled'>, scope=<Scope.UPSTREAM: 'upstream'>, "
        "error_type='rate_limit_error', status=429, retryable=True, retry_after=2.5, "
        f"retry_after_source='retry-after', ambiguous=True, usage={USAGE!r}, answered=False)"
    )


@pytest.mark.parametrize("made", [Usage(), Outcome(verdict=Verdict.SUCCESS)])
def test_what_is_left_out_is_the_fields_default(made: Usage | Outcome) -> None:
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(made)
        if field.default is not dataclasses.MISSING
    }
    assert len(defaults) >= 5
    assert {name: getattr(made, name) for name in defaults} == defaults


def _fields_of(value: Usage | Outcome) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@pytest.mark.parametrize("value", [USAGE, OUTCOME])
def test_equal_values_are_one_key(value: Usage | Outcome) -> None:
    again = dataclasses.replace(value)
    assert again is not value
    assert {value: "kept"}[again] == "kept"
    for name in _fields_of(value):
        another: dict[str, object] = {name: "another"}
        assert type(value)(**{**_fields_of(value), **another}) != value


@pytest.mark.parametrize("value", [USAGE, OUTCOME])
def test_copies_are_equal(value: Usage | Outcome) -> None:
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301 - our own
    assert copy.deepcopy(value) == value


@pytest.mark.parametrize("value", [USAGE, OUTCOME])
def test_nothing_can_be_set_or_added(value: Usage | Outcome) -> None:
    for name in (*_fields_of(value), "note"):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(value, name, None)
    assert not hasattr(value, "__dict__")


def test_fields_are_given_by_name_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        Outcome(Verdict.SUCCESS)  # type: ignore[call-arg] # what is wrong is what is tested
    with pytest.raises(TypeError, match="verdict"):
        Outcome()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="tokens"):
        Usage(tokens=1)  # type: ignore[call-arg]
