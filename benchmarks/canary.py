"""How soon a canary rolls a bad candidate back, and how often a good one by mistake.

Simulated rollouts through the default steps with `min_calls=50`, one call each half second, an SLO of at most 5 %
errors, and a baseline that fails in 1 % of calls; a run ends when the candidate is promoted or rolled back, or after
`--calls` calls. Prints, by how often the candidate fails, the share of rollouts that promoted it, the share that
rolled it back, and how many of its calls that took (median, 95th percentile). The last line is the same as JSON.
"""

import argparse
import json
import random

from resilient_llm.core.canary import Rollout, RolloutOptions, RolloutState
from resilient_llm.core.sample import Result
from resilient_llm.core.slo import SLO

BASELINE = 0.01
ERRORS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0)


def roll_out(error_ratio: float, seed: int, calls: int) -> tuple[RolloutState, int]:
    """Roll a candidate out that fails so often; give how that ended, and the number of its calls."""
    rng = random.Random(seed)
    rollout = Rollout(RolloutOptions(slo=SLO(error_ratio=0.05), min_calls=50, restart=False))
    drawn_for_it = 0
    for number in range(calls):
        now = number / 2
        drawn = rollout.draw(rng.random(), now)
        drawn_for_it += drawn.candidate
        failed = rng.random() < (error_ratio if drawn.candidate else BASELINE)
        rollout.record(drawn, now, Result.ERROR if failed else Result.SUCCESS)
        if rollout.state is not RolloutState.RUNNING:
            break
    return rollout.state, drawn_for_it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    print("| candidate fails | promoted | rolled back | after so many of its calls: median | 95 % |")
    print("|---|---|---|---|---|")
    figures = {}
    for ratio in ERRORS:
        ends = [roll_out(ratio, seed, options.calls) for seed in range(options.runs)]
        took = sorted(calls for state, calls in ends if state is RolloutState.ROLLED_BACK)
        promoted = sum(state is RolloutState.PROMOTED for state, _ in ends) / options.runs
        back = len(took) / options.runs
        median, late = (took[len(took) // 2], took[int(len(took) * 0.95)]) if took else (None, None)
        figures[f"{ratio:g}"] = {
            "promoted": promoted,
            "rolled_back": back,
            "median_calls": median,
            "p95_calls": late,
        }
        print(f"| {ratio:.0%} | {promoted:.1%} | {back:.1%} | {median or '-'} | {late or '-'} |")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
