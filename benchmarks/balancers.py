"""The balancers side by side, in one simulation: five minutes of calls to three targets of one model.

What is assumed, and the same for all:

- `quick` begins an answer in 0.3 s, `usual` in 0.5 s and `cheap` in 0.8 s (medians; lognormal, sigma 0.3). Then a token
  comes each 4 ms, 50 to 250 of them. `cheap` costs 1 and 4 dollars per million tokens, the others 2.5 and 10.
- All have the same weight, stand in this order, take eight calls at a time (a bulkhead of their own, without a queue),
  and have a circuit.
- `usual` is slow by ten from 100 s on and before 160 s; `quick` answers 503 from 200 s on and before 230 s.
- Eight calls a second come at random (Poisson), of 100 conversations, with prompts of 400 tokens (lognormal).

Times are of whole calls, those that had to be made again too. Spread is the largest share of a target in the answers
less the smallest. Stay is the share of calls that are answered by whom the conversation was answered by last. Nothing
here models prompt caches, which is what `PrefixAffinity` is for: how much it saves is up to the provider. The last line
is a JSON object with the figures of each.

    python benchmarks/balancers.py [--full]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from resilient_llm import (
    Bulkhead,
    Call,
    CallNext,
    CircuitBreaker,
    Policy,
    Price,
    Reply,
    Retry,
    Router,
    Target,
)
from resilient_llm.lab import (
    CallRecord,
    Chat,
    LogNormal,
    Network,
    Outage,
    Phase,
    Poisson,
    Report,
    Traffic,
    Uniform,
    Upstream,
    simulate,
)
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

__all__ = ["BALANCERS", "Figures", "measure"]

BALANCERS: Sequence[type[Balancer]] = (
    WeightedLeastConnections,
    LeastOutstandingTokens,
    PeakEWMA,
    WeightedRandom,
    Priority,
    Cheapest,
    PrefixAffinity,
)

SECONDS = 300.0
TARGETS = ("quick", "usual", "cheap")
FIRST_TOKEN = {"quick": 0.3, "usual": 0.5, "cheap": 0.8}
PRICES = {
    "quick": Price(input=2.5, output=10),
    "usual": Price(input=2.5, output=10),
    "cheap": Price(input=1, output=4),
}
OUTAGES = {"quick": [Outage(200, 230)]}
PHASES = {"usual": [Phase(100, 160, latency_factor=10)]}


class Figures(NamedTuple):
    """What one balancer came to; times in seconds."""

    success_ratio: float
    p50: float
    p99: float
    shares: dict[str, float]
    stay_ratio: float
    usd_per_1000: float

    @property
    def spread(self) -> float:
        """Give the largest share of a target less the smallest."""
        return max(self.shares.values()) - min(self.shares.values())


class Conversations:
    """Remember which conversation each call belongs to."""

    def __init__(self) -> None:
        self.of: dict[int, object] = {}

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Look at a call that passes."""
        record, messages = call.request.template, call.request.json["messages"]
        if isinstance(record, CallRecord):
            self.of[record.number] = str(messages)
        return await call_next(call)

    def stay_ratio(self, report: Report) -> float:
        """Give the share of calls answered by whom the one before in the same conversation was answered by."""
        last: dict[object, str | None] = {}
        stayed = went = 0
        for call in report.calls:
            conversation = self.of[call.number]
            if call.ok:
                if conversation in last:
                    stayed += last[conversation] == call.answered_by
                    went += last[conversation] != call.answered_by
                last[conversation] = call.answered_by
        return stayed / (stayed + went)


def measure(balancer: Balancer, *, seconds: float = SECONDS, seed: int = 1) -> Figures:
    """Simulate one balancer."""
    network = Network({f"https://{name}.test/v1": upstream(name) for name in TARGETS})
    conversations = Conversations()
    policies: list[Policy] = [
        conversations,
        Retry(),
        Router([target(name) for name in TARGETS], balancer=balancer),
    ]
    traffic = Traffic(
        arrivals=Poisson(8.0), request=Chat(prompt_tokens=LogNormal(400, 0.8), questions=100, max_tokens=300)
    )
    report = simulate(policies, network, traffic, duration=seconds, seed=seed)
    answers = sum(report.answered_by.values())
    return Figures(
        success_ratio=report.success_ratio,
        p50=report.latency.p50,
        p99=report.latency.p99,
        shares={name: report.answered_by[f"{name}.test"] / answers for name in TARGETS},
        stay_ratio=conversations.stay_ratio(report),
        usd_per_1000=report.usd_per_answer * 1000,
    )


def upstream(name: str) -> Upstream:
    """Make what stands behind a target."""
    return Upstream(
        first_token=LogNormal(FIRST_TOKEN[name], 0.3),
        per_token=0.004,
        output_tokens=Uniform(50, 250),
        outages=OUTAGES.get(name, ()),
        phases=PHASES.get(name, ()),
        input_price=PRICES[name].input,
        output_price=PRICES[name].output,
    )


def target(name: str) -> Target:
    """Make a target."""
    room = Bulkhead(max_concurrent=8, max_queued=0, key="target")
    return Target(
        name=name, url=f"https://{name}.test/v1", price=PRICES[name], policies=[room, CircuitBreaker()]
    )


def main(seeds: int) -> None:
    """Print the table, the mean over the seeds, and as JSON in the last line."""
    print("| balancer | success | p50 | p99 | quick | usual | cheap | spread | stay | USD per 1,000 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    told: dict[str, dict[str, float]] = {}
    for balancer in BALANCERS:
        runs = [measure(balancer(), seed=seed) for seed in range(1, seeds + 1)]
        mean = {
            "success": sum(run.success_ratio for run in runs) / seeds,
            "p50_s": sum(run.p50 for run in runs) / seeds,
            "p99_s": sum(run.p99 for run in runs) / seeds,
            **{name: sum(run.shares[name] for run in runs) / seeds for name in TARGETS},
            "spread": sum(run.spread for run in runs) / seeds,
            "stay": sum(run.stay_ratio for run in runs) / seeds,
            "usd_per_1000": sum(run.usd_per_1000 for run in runs) / seeds,
        }
        shares = " | ".join(f"{mean[name]:.0%}" for name in (*TARGETS, "spread", "stay"))
        print(
            f"| `{balancer.__name__}` | {mean['success']:.2%} | {mean['p50_s']:.2f} s | {mean['p99_s']:.2f} s "
            f"| {shares} | {mean['usd_per_1000']:.2f} |"
        )
        told[balancer.__name__] = {name: round(value, 4) for name, value in mean.items()}
    print(json.dumps(told))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="five seeds; their mean is printed")
    main(5 if parser.parse_args().full else 1)
