"""Calls come when the arrival process says, and not otherwise."""

import itertools
import math
from random import Random
from statistics import fmean, stdev

import pytest

from resilient_llm import ConfigurationError
from resilient_llm.lab import Burst, ClosedLoop, Paced, Poisson, Steps, episodes


def first(arrivals: "Burst | Paced | Poisson | Steps", count: int) -> list[float]:
    return list(itertools.islice(arrivals.times(Random(1)), count))


def test_paced() -> None:
    assert first(Paced(0.5, start=2), 4) == [2, 2.5, 3, 3.5]
    assert first(Paced(0.1), 1_000_001)[-1] == 100_000, "errors do not add up"


def test_poisson_has_exponential_gaps() -> None:
    times = first(Poisson(4.0, start=10), 20_000)
    gaps = [later - earlier for earlier, later in itertools.pairwise([10.0, *times])]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(0.25, rel=0.04)
    assert stdev(gaps) == pytest.approx(0.25, rel=0.05)


def test_burst() -> None:
    assert first(Burst(3, start=5), 10) == [5, 5, 5]
    assert first(Burst(2, start=1, every=10), 5) == [1, 1, 11, 11, 21]


def test_steps_change_the_rate() -> None:
    times = list(
        itertools.takewhile(
            lambda at: at < 3000, Steps([(0, 1.0), (1000, 0.0), (2000, 10.0)]).times(Random(1))
        )
    )
    assert times == sorted(times)
    counts = [sum(start <= at < start + 1000 for at in times) for start in (0, 1000, 2000)]
    assert counts[0] == pytest.approx(1000, abs=5 * math.sqrt(1000))
    assert counts[1] == 0
    assert counts[2] == pytest.approx(10_000, abs=5 * 100)


def test_episodes_take_their_share_of_the_time() -> None:
    windows = list(episodes(good=90, bad=10, until=1000))
    assert windows == [(at, at + 10) for at in range(90, 1000, 100)]
    assert list(episodes(good=90, bad=10, until=90)) == []
    assert list(episodes(good=5, bad=0, until=20)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(0),
        lambda: Poisson(1, start=-1),
        lambda: Paced(0),
        lambda: Paced(math.inf),
        lambda: Burst(0),
        lambda: Burst(1, every=0),
        lambda: Steps([]),
        lambda: Steps([(5, 1), (5, 2)]),
        lambda: Steps([(0, -1)]),
        lambda: ClosedLoop(0),
        lambda: ClosedLoop(1, after_failure=0),
    ],
)
def test_what_cannot_be_is_refused(make: "type[object]") -> None:
    with pytest.raises(ConfigurationError, match="allowed are"):
        make()
