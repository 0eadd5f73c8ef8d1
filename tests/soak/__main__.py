"""Mixed load with faults, reloads, killed providers and a killed store, and whether the sidecar lost anything by it.

Prints how it goes, a table, and as its last line JSON; the exit code is 0 only if all held.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio
import click

from tests.soak import books, vital_signs
from tests.soak.chaos import Chaos
from tests.soak.load import Load
from tests.soak.world import World, world


@dataclass
class Report:
    """What came of it."""

    problems: list[str]
    numbers: dict[str, Any] = field(default_factory=dict)


async def soak(made: World, *, seconds: float, rate: float, seed: int, rounds: int, every: float) -> Report:
    """Ask for so long in all, in rounds with a rest after each; the first is to warm up."""
    began = time.monotonic()
    rng = Random(seed)
    load = Load(made.gateway.url, rate, rng)
    chaos = Chaos(made, rng)
    signs: list[vital_signs.Signs] = []
    problems: list[str] = []
    for number in range(1, rounds + 1):
        is_last = number == rounds
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(chaos.reign, every)
            tasks.start_soon(_progress, made, load, chaos, began)
            await load.ask_for(seconds / rounds, (lambda: chaos.complete) if is_last else (lambda: True))
            tasks.cancel_scope.cancel()
        now, held = await vital_signs.at_rest(made.gateway, signs[0].descriptors if signs else None)
        signs.append(now)
        problems += held
        click.echo(f"at rest: {now.megabytes:.1f} MB, {now.descriptors} descriptors, {now.threads} threads")
    problems += vital_signs.grown(signs[0], signs[-1])
    with anyio.move_on_after(30):  # what it has written may be on its way
        while len(made.gateway.requests()) < len(load.got):  # noqa: ASYNC110 - it comes by another thread
            await anyio.sleep(0.1)
    given: dict[str, dict[str, Any]] = {}
    for upstream in made.upstreams:
        given |= upstream.given()
    log = made.gateway.requests()
    problems += books.check(load.got, log, given)
    problems += [
        f"the sidecar logged {line}"
        for line in made.gateway.lines
        if line["level"] == "error" and "not reloaded" not in line["message"]
    ]
    logged, told = books.usage(load.got, log, given)
    outcomes = Counter(line["outcome"] for line in log)
    return Report(
        problems,
        {
            "seconds": round(time.monotonic() - began),
            "requests": len(load.got),
            "clients": dict(load.counts().most_common(6)),
            "logged": dict(outcomes),
            "statuses": dict(sorted(Counter(str(got.status) for got in load.got).items())),
            "reasons": dict(Counter(line["error"] for line in log if line["error"]).most_common(12)),
            "retries": sum(line.get("retries", 0) for line in log),
            "tokens_logged": logged,
            "tokens_given": told,
            "chaos": dict(chaos.done),
            "megabytes": [round(each.megabytes, 1) for each in signs],
            "descriptors": [each.descriptors for each in signs],
            "threads": [each.threads for each in signs],
        },
    )


async def _progress(made: World, load: Load, chaos: Chaos, began: float) -> None:
    while True:
        await anyio.sleep(5)
        signs, counts = vital_signs.look(made.gateway), load.counts()
        good = sum(counts[what] for what in ("ok", "error", "event", "broken", "left"))
        click.echo(
            f"{time.monotonic() - began:6.0f} s  {len(load.got):6} requests: "
            + "  ".join(f"{what} {counts[what]}" for what in ("ok", "error", "event", "broken", "left"))
            + f"  wrong {len(load.got) - good}  running {load.running}"
            f"  {signs.megabytes:.0f} MB  {signs.descriptors} fds  ({chaos.last})"
        )


def run(*, minutes: float, rate: float, seed: int, rounds: int, every: float) -> Report:
    """Soak in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, world(Path(folder), seed) as made:

        async def main() -> Report:
            return await soak(made, seconds=minutes * 60, rate=rate, seed=seed, rounds=rounds, every=every)

        return anyio.run(main)


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(0.2), default=30.0, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Requests a second."
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=6, show_default=True, help="Rests, to measure at.")
@click.option(
    "--every", type=click.FloatRange(0.1), default=4.0, show_default=True, help="Seconds between disasters."
)
def main(*, minutes: float, rate: float, seed: int, rounds: int, every: float) -> None:
    """Soak, and report."""
    report = run(minutes=minutes, rate=rate, seed=seed, rounds=rounds, every=every)
    click.echo()
    for name, value in report.numbers.items():
        shown = (
            "  ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        )
        click.echo(f"{name:>14}  {shown}")
    for problem in report.problems[:20]:
        click.echo(f"PROBLEM: {problem}")
    held = not report.problems
    click.echo(json.dumps({"held": held, "problems": len(report.problems), **report.numbers}))
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
