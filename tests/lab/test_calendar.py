"""Windows of time are open from their start on, and before their end."""

from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.lab import Outage
from resilient_llm.lab.calendar import Calendar

WINDOWS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda w: Outage(w[0], w[0] + w[1])), max_size=20
)


@given(windows=WINDOWS, times=st.lists(st.integers(0, 80)).map(sorted))
def test_it_gives_exactly_the_open_ones(windows: list[Outage], times: list[int]) -> None:
    calendar = Calendar(windows)
    for now in times:
        expected = [window for window in windows if window.start <= now < window.end]
        assert sorted(calendar.at(now), key=id) == sorted(expected, key=id)


def test_those_that_open_first_come_first() -> None:
    late, early, also_early = Outage(2, 9, "500"), Outage(1, 9, "503"), Outage(1, 9, "reset")
    assert list(Calendar([late, early, also_early]).at(5))[-1] is late
