"""A table of states that are forgotten when they are idle, a few with each use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.sweep import Sweep


@given(
    until=st.dictionaries(st.integers(0, 50), st.floats(0, 10), max_size=30),
    counts=st.lists(st.integers(1, 8), min_size=1),
    now=st.floats(0, 10),
    data=st.data(),
)
def test_every_idle_key_is_forgotten_in_turn_and_no_other(
    until: dict[int, float], counts: list[int], now: float, data: st.DataObject
) -> None:
    before = until.copy()
    kept = data.draw(st.sampled_from([*sorted(until), -1]))
    sweep = Sweep(until, lambda ends, at: ends <= at)  # type: ignore[arg-type]  # keys of one kind
    looked = 0
    for count in counts:
        sweep.look(count, now, kept)
        looked += count
        gone = before.keys() - until.keys()
        assert all(before[key] <= now and key != kept for key in gone)
        if looked >= len(before):  # each has had a turn
            assert gone == {key for key, ends in before.items() if ends <= now and key != kept}
    sweep.clear()
    until.clear()
    sweep.look(3, now, kept)
    assert not until


def test_keys_that_came_since_have_the_next_turn() -> None:
    states = {"a": 0.0}
    sweep = Sweep(states, lambda _state, _now: True)  # type: ignore[arg-type]
    states["b"] = 0.0
    sweep.look(1, 0.0, "b")
    states["c"] = 0.0
    sweep.look(1, 0.0, "b")
    assert states.keys() <= {"a", "b", "c"}
    sweep.look(3, 0.0, None)
    assert not states
