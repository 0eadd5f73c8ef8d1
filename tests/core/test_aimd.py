"""The adaptive limit: what each sample does to it, what no samples can do, and where it settles."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.aimd import AIMDLimit, Sent


def sample(
    limit: AIMDLimit,
    times: int = 1,
    *,
    in_flight: int = 1,
    duration: float = 1.0,
    dropped: bool = False,
    generation: int | None = None,
) -> int:
    """Let so many attempts end alike, sent under the limit as it is unless told; gives the limit after."""
    for _ in range(times):
        sent = Sent(0.0, in_flight, limit.generation if generation is None else generation)
        limit.on_sample(duration, sent, dropped=dropped)
    return limit.limit


def round_trip(limit: AIMDLimit, *, duration: float = 1.0) -> int:
    """Let as many attempts as are allowed succeed together; gives the limit after."""
    return sample(limit, limit.limit, in_flight=limit.limit, duration=duration)


def test_a_round_trip_of_successes_adds_one() -> None:
    limit = AIMDLimit(initial=10, min_gain_ratio=None)
    sizes = [round_trip(limit) for _ in range(30)]
    assert sizes[0] in (10, 11)  # ten times a tenth is a little less than one by the end
    assert sizes[-1] == pytest.approx(40, abs=2)


def test_it_does_not_grow_while_it_is_not_in_use() -> None:
    limit = AIMDLimit(initial=20)
    assert sample(limit, 500, in_flight=9) == 20
    assert sample(limit, 100, in_flight=10) > 20


def test_a_drop_takes_three_tenths() -> None:
    assert sample(AIMDLimit(initial=20), dropped=True) == 14


def test_a_burst_of_drops_is_one_and_what_was_sent_before_it_makes_nothing_grow() -> None:
    limit = AIMDLimit(initial=20)
    sent_in = limit.generation
    assert sample(limit, 4, generation=sent_in, dropped=True) == 14
    assert sample(limit, 1000, generation=sent_in, in_flight=200) == 14
    assert sample(limit, dropped=True) == 9


def test_it_grows_slowly_just_below_where_something_was_dropped() -> None:
    limit = AIMDLimit(initial=100, min_gain_ratio=None)
    assert sample(limit, dropped=True) == 70
    reached = dict[int, int]()
    for rounds in range(400):
        reached.setdefault(round_trip(limit), rounds)
    assert reached[89] - reached[70] <= 22
    assert 90 <= reached[100] - reached[90] <= 120
    assert reached[120] - reached[101] <= 22


def until_it_grows(limit: AIMDLimit) -> int:
    """Count the successes until one more is allowed than are now."""
    size, successes = limit.limit, 0
    while limit.limit == size:
        sample(limit, in_flight=size)
        successes += 1
    return successes


def test_a_probe_that_finds_the_same_again_takes_twice_as_long_the_next_time() -> None:
    limit = AIMDLimit(initial=2, min_gain_ratio=None)
    probes = []
    for _ in range(10):
        sample(limit, in_flight=2, dropped=True)
        assert limit.limit == 1
        probes.append(until_it_grows(limit))
    assert probes[0] < 8
    assert all(1.6 * one < two < 2.4 * one for one, two in itertools.pairwise(probes[:6]))
    assert all(230 <= probe < 300 for probe in probes[7:])
    assert until_it_grows(limit) < 10, "two at a time are well, and nothing is known of three"
    sample(limit, in_flight=3, dropped=True)
    assert until_it_grows(limit) < 10, "a new place: it is not known yet that more is too much for good"


def test_what_does_not_depend_on_the_load_makes_no_probe_longer() -> None:
    """One attempt in fifty is refused, however many there are: every time somewhere else."""
    limit = AIMDLimit(min_gain_ratio=None)
    sizes = [sample(limit, in_flight=limit.limit, dropped=number % 50 == 0) for number in range(20_000)]
    assert statistics.mean(sizes) > 5


def test_concurrency_that_only_makes_everything_slower_is_given_back() -> None:
    limit = AIMDLimit(initial=20)
    sizes = [round_trip(limit, duration=0.1 * limit.limit) for _ in range(200)]
    assert max(sizes) <= 30
    assert sizes[-1] < 5


def test_what_a_decrease_has_brought_is_judged_by_what_was_sent_after_it() -> None:
    limit = AIMDLimit(initial=20, maximum=20)
    sample(limit, 200, in_flight=20)
    sample(limit, 60, in_flight=20)  # most of a window, under the old load
    assert sample(limit, dropped=True) == 14
    # Three tenths less in flight, three tenths faster: 20 were too many, and a window of 14 is enough to see it.
    sizes = [sample(limit, in_flight=14, duration=0.7) for _ in range(100)]
    assert max(sizes) == 18
    assert sizes[-1] == 14


def test_concurrency_that_costs_nothing_is_taken() -> None:
    limit = AIMDLimit(initial=20)
    assert [round_trip(limit) for _ in range(200)][-1] == 200


@pytest.mark.parametrize("min_gain_ratio", [None, 0.0])
def test_the_knee_is_not_looked_for_unless_asked(min_gain_ratio: float | None) -> None:
    limit = AIMDLimit(initial=20, min_gain_ratio=min_gain_ratio)
    assert [round_trip(limit, duration=0.1 * limit.limit) for _ in range(200)][-1] == 200


def test_durations_of_nothing_are_no_trouble() -> None:
    limit = AIMDLimit(initial=20)
    assert [round_trip(limit, duration=0.0) for _ in range(100)][-1] > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimum": 0}, "min=0"),
        ({"minimum": 30, "maximum": 20}, "max=20"),
        ({"initial": 0}, "initial=0"),
        ({"initial": 21, "maximum": 20}, "initial=21"),
        ({"decrease_ratio": 1.0}, "decrease_ratio=1.0"),
        ({"decrease_ratio": 0.0}, "decrease_ratio=0.0"),
        ({"min_gain_ratio": 1.0}, "min_gain_ratio=1.0"),
        ({"min_gain_ratio": -0.1}, "min_gain_ratio=-0.1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AIMDLimit(**options)  # type: ignore[arg-type]


# Under any sequence of samples


@dataclass(frozen=True)
class Samples:
    """So many attempts that ended alike, sent so many decreases ago."""

    times: int
    duration: float
    in_flight: int
    dropped: bool
    age: int


SAMPLES = st.lists(
    st.builds(
        Samples,
        times=st.sampled_from([1, 1, 10, 200]),
        duration=st.floats(0, 20),
        in_flight=st.integers(1, 300),
        dropped=st.sampled_from([False, False, False, True]),
        age=st.sampled_from([0, 0, 0, 1, 3]),
    ),
    max_size=40,
)
LIMITS = st.builds(
    lambda bounds, initial, ratio, gain: AIMDLimit(
        minimum=bounds[0],
        maximum=bounds[1],
        initial=min(max(initial, bounds[0]), bounds[1]),
        decrease_ratio=ratio,
        min_gain_ratio=gain,
    ),
    st.tuples(st.integers(1, 100), st.integers(1, 100)).map(sorted),
    st.integers(1, 100),
    st.sampled_from([0.1, 0.5, 0.7, 0.95]),
    st.sampled_from([None, 0.0, 0.25, 0.9]),
)


def steps(limit: AIMDLimit, samples: list[Samples]) -> Iterator[tuple[int, bool, float, float]]:
    """Feed samples; gives for each the generation it was sent in, whether dropped, the limit before and after."""
    for each in samples:
        generation = limit.generation - each.age
        for _ in range(each.times):
            before = limit._limit
            got = sample(
                limit,
                in_flight=each.in_flight,
                duration=each.duration,
                dropped=each.dropped,
                generation=generation,
            )
            assert got == limit.limit == int(limit._limit)
            yield generation, each.dropped, before, limit._limit


@given(LIMITS, SAMPLES)
def test_it_stays_in_its_bounds_and_never_leaps(limit: AIMDLimit, samples: list[Samples]) -> None:
    for _, dropped, before, after in steps(limit, samples):
        assert limit._min <= after <= limit._max
        assert after <= before + 1 / before
        assert not dropped or after <= before
        assert after >= max(limit._min, min(limit._decrease_ratio, 0.8) * before) - 1e-9


@given(LIMITS, SAMPLES)
def test_one_decrease_at_most_per_round_trip(limit: AIMDLimit, samples: list[Samples]) -> None:
    decreased_in = set[int]()
    for generation, _, before, after in steps(limit, samples):
        if generation in decreased_in or generation < 0:
            assert after == before
        if after < before:
            decreased_in.add(generation)


@given(SAMPLES, st.integers(1, 300), st.integers(1, 300))
def test_the_better_the_news_the_higher_the_limit(samples: list[Samples], some: int, more: int) -> None:
    some, more = sorted((some, more))
    after = []
    for in_flight, dropped in ((some, True), (some, False), (more, False)):
        limit = AIMDLimit(min_gain_ratio=None)
        for _ in steps(limit, samples):
            pass
        sample(limit, in_flight=in_flight, dropped=dropped)
        after.append(limit._limit)
    assert after == sorted(after)


# Against an upstream


@dataclass
class Upstream:
    """A closed loop in its own time: always somebody waits, `duration` and `refuses` are the upstream's."""

    limit: AIMDLimit
    duration: Callable[[int], float]
    refuses: Callable[[int], bool] = lambda in_flight: False
    now: float = 0.0
    in_flight: int = 0
    ends: list[tuple[float, int, Sent, bool]] = field(default_factory=list)

    def run(self, until: float) -> tuple[float, float, float]:
        """Give the mean limit, the ratio of refusals, and the successes per second."""
        serial, sizes, refused, done, began = 0, [], 0, 0, self.now
        while self.now < until:
            while self.in_flight < self.limit.limit:
                self.in_flight += 1
                serial += 1
                full = self.refuses(self.in_flight)
                duration = 0.05 if full else self.duration(self.in_flight)
                sent = Sent(self.now, self.in_flight, self.limit.generation)
                heapq.heappush(self.ends, (self.now + duration, serial, sent, full))
            self.now, _, sent, full = heapq.heappop(self.ends)
            self.in_flight -= 1
            self.limit.on_sample(self.now, sent, dropped=full)
            sizes.append(self.limit.limit)
            refused += full
            done += not full
        return statistics.mean(sizes), refused / len(sizes), done / (until - began)


@pytest.mark.parametrize("initial", [1, 20, 200])
def test_it_settles_at_a_cap_that_refuses(initial: int) -> None:
    rng = random.Random(initial)
    upstream = Upstream(
        AIMDLimit(initial=initial), lambda _: rng.lognormvariate(0, 0.5), lambda in_flight: in_flight > 50
    )
    upstream.run(60)
    size, refused, throughput = upstream.run(360)
    assert 40 <= size <= 51
    assert refused < 0.005
    assert throughput > 0.85 * 50 / math.exp(0.5**2 / 2)  # the mean of such a distribution


@pytest.mark.parametrize("takes", [1, 2, 3, 5, 7, 10, 14, 20])
def test_what_is_found_again_and_again_is_seldom_tried(takes: int) -> None:
    rng = random.Random(takes)
    upstream = Upstream(
        AIMDLimit(), lambda _: rng.lognormvariate(0, 0.5), lambda in_flight: in_flight > takes
    )
    upstream.run(1_000)
    _, refused, throughput = upstream.run(3_000)
    assert refused < 0.006
    assert throughput > 0.9 * takes / math.exp(0.5**2 / 2)


@pytest.mark.parametrize("takes", [1, 3, 10])
def test_it_follows_a_small_cap_that_doubles(takes: int) -> None:
    rng = random.Random(takes)
    upstream = Upstream(
        AIMDLimit(), lambda _: rng.lognormvariate(0, 0.5), lambda in_flight: in_flight > takes
    )
    upstream.run(1_000)
    takes *= 2
    upstream.run(1_000 + 400)
    size, _, _ = upstream.run(2_000)
    assert size > 0.85 * takes


@pytest.mark.parametrize("initial", [1, 20, 120])
def test_it_settles_near_a_knee_that_nobody_tells_of_and_follows_it(initial: int) -> None:
    rng = random.Random(initial)
    knee = 30
    upstream = Upstream(
        AIMDLimit(initial=initial),
        lambda in_flight: rng.lognormvariate(0, 0.4) * max(1.0, in_flight / knee),
    )
    best = knee / math.exp(0.4**2 / 2)
    upstream.run(200)
    size, _, throughput = upstream.run(400)
    assert 24 <= size <= 54
    assert throughput > 0.85 * best
    knee = 15
    upstream.run(600)
    size, _, throughput = upstream.run(800)
    assert 12 <= size <= 36
    assert throughput > 0.85 * best / 2
    knee = 60
    upstream.run(950)
    size, _, throughput = upstream.run(1150)
    assert 48 <= size <= 108
    assert throughput > 0.85 * best * 2


def test_noise_alone_does_not_hold_it_down() -> None:
    """Durations that have nothing to do with the load, and drift besides."""
    rng = random.Random(1)
    drift = 0.0

    def duration(_in_flight: int) -> float:
        nonlocal drift
        drift += -drift / 2000 + 0.3 * (2 / 2000) ** 0.5 * rng.gauss(0, 1)
        return rng.lognormvariate(drift, 1.0)

    upstream = Upstream(AIMDLimit(), duration, lambda in_flight: in_flight > 50)
    upstream.run(60)
    size, _, _ = upstream.run(500)
    assert size > 38
