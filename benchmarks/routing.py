"""What it costs to pick a target among 3 and among 300: microseconds, and how many times a bare weighted random choice.

Every balancer picks from the same pool, in which calls are in flight, answers have come, some late, and one target
in twenty has failed of late; `router` is a whole decision of a `Router` with circuits and credentials, and `bare` is
`random.choices` with cumulative weights. Everything is measured in turns (A B C A B C ...); figures are medians of
the rounds. Only their ratios hold.

    python benchmarks/routing.py [--full]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from random import Random

from benchmarks._running import run
from resilient_llm import Call, CircuitBreaker, Pipeline, Profile, Request, Router, Target
from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.credentials import Credential
from resilient_llm.routing.balancers import (
    Balancer,
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)
from resilient_llm.telemetry.silent import SILENT

Pick = Callable[[], object]

SIZES = (3, 300)
PICKS = 200
WARM_UP = (
    5000  # what is worked out once, such as the rankings of all slots of the affinity, is no pick's cost
)
NOW = 1000.0
BALANCERS: tuple[Balancer, ...] = (
    WeightedLeastConnections(),
    LeastOutstandingTokens(),
    PeakEWMA(),
    WeightedRandom(),
    Priority(),
    Cheapest(),
    PrefixAffinity(),
)


class Conversation:
    """Need tokens, and a prefix that is another one each time."""

    def __init__(self) -> None:
        self.tokens = 800.0
        self._prefix = 0

    def prefix(self) -> int:
        """Give the hash of the next of many conversations."""
        self._prefix += 1
        return self._prefix


def pool_of(size: int, random: Random) -> Pool:
    """Make a pool that has been in use for a while."""
    loads = []
    for number in range(size):
        load = TargetLoad(
            f"target-{number}", weight=random.choice([1.0, 1.0, 2.0]), price=random.choice([0.6, 3.0])
        )
        for call in range(20):
            load.sent(NOW - 20 + call, 800)
            failed = number % 20 == 1 and call % 4 == 0
            load.finished(
                NOW - 19 + call, 800, ok=not failed, first_token=None if failed else random.uniform(0.3, 0.9)
            )
        for _ in range(random.randint(0, 10)):
            load.sent(NOW, 800)
        loads.append(load)
    return Pool(loads)


def bare(pool: Pool, random: Random) -> Pick:
    """Pick with the standard library's weighted choice."""
    loads, bounds = pool.loads, list(accumulate(load.weight for load in pool))
    return lambda: random.choices(loads, cum_weights=bounds)[0]


def picking(balancer: Balancer, pool: Pool, random: Random) -> Pick:
    """Pick with a balancer, as a router does: the first target in its order."""
    need = Conversation()

    def pick() -> TargetLoad:
        for load in balancer.order(pool, need, NOW, random):
            return load
        raise AssertionError

    return pick


def deciding(size: int, random: Random) -> Pick:
    """Decide as a `Router` does for the first attempt of a call: circuits, credentials and all."""
    breaker, key = CircuitBreaker(), Credential(name="key", value=lambda: "none")
    targets = [
        Target(name=f"target-{number}", url=f"https://{number}.test/v1", credential=key, policies=[breaker])
        for number in range(size)
    ]
    router = Router(targets, random=random)
    profile = Profile(provider="openai", operation="chat", model="m")
    call = Call(
        Request("POST", "https://any.test/v1/chat/completions", [], b"{}"),
        read=lambda _: profile,
        target=Target(name="any.test"),
        loop=Pipeline([router]).loop(),
        telemetry=SILENT,
        started=NOW,
    )

    def decide() -> object:
        call.route = None
        return router._route(call, NOW).choose(call, NOW)

    return decide


def cases(seed: int = 1) -> dict[str, Pick]:
    """Give what is measured, by name and number of targets."""
    found: dict[str, Pick] = {}
    for size in SIZES:
        random = Random(seed)
        pool = pool_of(size, random)
        found[f"bare_{size}"] = bare(pool, random)
        for balancer in BALANCERS:
            found[f"{balancer.strategy}_{size}"] = picking(balancer, pool, random)
        found[f"router_{size}"] = deciding(size, random)
    return found


def measure(picks: dict[str, Pick], rounds: int) -> dict[str, float]:
    """Time everything in turns; gives the median of the rounds, in microseconds a pick."""
    for pick in picks.values():
        for _ in range(WARM_UP):
            pick()
    times: dict[str, list[float]] = {name: [] for name in picks}
    for _ in range(rounds):
        for name, pick in picks.items():
            began = time.perf_counter()
            for _ in range(PICKS):
                pick()
            times[name].append((time.perf_counter() - began) / PICKS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


async def main(rounds: int) -> None:
    """Measure, print a table, and the figures as JSON in the last line."""
    figures = measure(cases(), rounds)
    print(f"{'':<28}" + "".join(f"{f'us of {size}':>12}{'x bare':>8}" for size in SIZES))
    for name in ("bare", *(balancer.strategy for balancer in BALANCERS)):
        cells = [(figures[f"{name}_{size}"], figures[f"bare_{size}"]) for size in SIZES]
        print(f"{name:<28}" + "".join(f"{value:>12.2f}{value / least:>8.2f}" for value, least in cells))
    values = {f"{name}_us": round(value, 3) for name, value in figures.items()}
    for name, value in figures.items():
        kind, _, size = name.rpartition("_")
        if kind != "bare":
            values[f"{name}_ratio"] = round(value / figures[f"bare_{size}"], 2)
    print(json.dumps(values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="five times as many rounds")
    run(main(150 if parser.parse_args().full else 30))
