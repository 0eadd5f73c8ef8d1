"""What hedging does to an upstream of which one reply in twenty is slow, and what it costs; seeded, in virtual time."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from resilient_llm import Call, Hedge, Policy, Reply, Retry
from resilient_llm.outcome import SUCCESS
from tests.policies.hedging import InTurn
from tests.support import Door, Nothing

pytestmark = pytest.mark.anyio

HEDGE_PAGE = Path(__file__).parents[2] / "docs" / "hedge.md"
CALLS = 2000
PER_SECOND = 10.0


class Bimodal:
    """Answer in about half a second, one time in twenty in ten times that."""

    def __init__(self, random: Random, slow_ratio: float = 0.05) -> None:
        self.random = random
        self.slow_ratio = slow_ratio
        self.attempts = 0

    async def __call__(self, attempt: Call) -> Reply:
        """Take that long."""
        self.attempts += 1
        seconds = 0.5 * self.random.lognormvariate(0, 0.2)
        await anyio.sleep(seconds * 10 if self.random.random() < self.slow_ratio else seconds)
        attempt.finish(SUCCESS)
        return Reply(200, [], Nothing(), complete=True)


class Simulation:
    """Calls that come at random, on average so many a second."""

    def __init__(self, *policies: Policy, seed: int, slow_ratio: float = 0.05) -> None:
        self.random = Random(seed)
        self.upstream = Bimodal(Random(seed + 1), slow_ratio)
        self.door = Door(*policies, provider=self.upstream)
        self.took: list[float] = []

    async def run(self) -> None:
        """Make all calls."""
        async with anyio.create_task_group() as tasks:
            for _ in range(CALLS):
                tasks.start_soon(self._call)
                await anyio.sleep(self.random.expovariate(PER_SECOND))

    async def _call(self) -> None:
        began = anyio.current_time()
        await self.door()
        self.took.append(anyio.current_time() - began)

    def percentile(self, share: float) -> float:
        """Give the seconds within which such a share of the calls was answered."""
        return sorted(self.took)[int(share * len(self.took))]

    @property
    def extra_ratio(self) -> float:
        """Give the attempts made over one for each call, per call."""
        return (self.upstream.attempts - CALLS) / CALLS


async def simulated(*policies: Policy, seed: int, **options: Any) -> Simulation:
    simulation = Simulation(*policies, seed=seed, **options)
    await simulation.run()
    return simulation


@pytest.mark.parametrize("seed", [1, 2])
async def test_with_a_budget_of_a_twentieth_the_slowest_hundredth_is_less_than_half_as_slow(
    seed: int,
) -> None:
    without = await simulated(Retry(), InTurn(), seed=seed)
    hedged = await simulated(Retry(), Hedge(), InTurn(), seed=seed)
    assert hedged.percentile(0.99) <= without.percentile(0.99) / 2
    assert hedged.percentile(0.5) == pytest.approx(without.percentile(0.5), rel=0.05)
    assert 0.04 < hedged.extra_ratio <= 0.05 + 1 / CALLS


async def test_the_figures_of_the_documentation_are_those_of_one_run() -> None:
    stacks: dict[str, list[Policy]] = {"without": [], "hedged": [Hedge()]}
    for name, policies in stacks.items():
        run = await simulated(Retry(), *policies, InTurn(), seed=1)
        times = [f"{run.percentile(share):.2f} s" for share in (0.5, 0.95, 0.98, 0.99)]
        row = f"| {' | '.join([name, *times, f'{1 + run.extra_ratio:.2f}'])} |"
        assert row in HEDGE_PAGE.read_text().splitlines()


async def test_an_upstream_that_is_slow_for_everybody_costs_no_more_than_the_budget() -> None:
    hedged = await simulated(Retry(), Hedge(), InTurn(), seed=4, slow_ratio=0.4)
    assert hedged.extra_ratio <= 0.05 + 1 / CALLS
