"""The sidecar beside other gateways: requests a second, what they add, what they cost. One run, one provider for all.

Compared are the sidecar with its five layers (bulkhead and key of a tenant, retry, circuit, concurrency limit, pooled
connections; also a deadline and guarded streams), the sidecar with all of that off that can be, LiteLLM's proxy, the
gateways of Portkey and MLflow, smg and vllm-router (both in Rust), and nginx, as what the machine can do. Nobody logs,
traces or measures requests in the compared figures; what that costs the sidecar, --full says.

The machine is shared like this: each gateway has core 0 for itself, and the provider (`_sidecar_upstream`) and the
load (`_sidecar_load`), processes of their own, have core 1, where both together manage more than nginx does. With
--full there is a second part in which gateways have two workers and all processes both cores. All run at once and
idle while others are measured, in turns (A B C A B C ...); figures are medians of the rounds. On a machine that does
other things, too, only ratios hold, and the processor time of a request more than the rate.

Peers are installed on first use (see `_gateways`), which takes minutes once; one that cannot be had is left out, and is
null in the last line. What is added is the latency at one request in flight less that of the provider alone.

    python -m benchmarks.sidecar [--full] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks._children import Watch
from benchmarks._gateway_process import Gateway, NotToBeHadError, Running, affinity, start
from benchmarks._gateways import GATEWAYS, OBSERVED
from benchmarks._running import run
from benchmarks._sidecar_load import Asking, offer

IN_FLIGHT = 64
STREAMS = 16
EVENTS = 50
PACED = 8
PACE = 10
_GATEWAY, _REST = {0}, {1}

Figures = Mapping[str, float]


@contextmanager
def provider() -> Iterator[int]:
    """Start the provider; gives its port."""
    with affinity(_REST):
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._sidecar_upstream"], stdout=subprocess.PIPE
        )
    watch = Watch(process)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        watch.release()
        process.kill()
        process.wait()
        process.stdout.close()


async def measure(asking: Asking, gateway: Running | None, seconds: float) -> dict[str, float]:
    """Take one round of figures of a gateway, or of the provider alone; what it cannot do is missing."""
    figures: dict[str, float] = {}
    streams = replace(asking, events=EVENTS)
    paced = replace(streams, pace=PACE)

    def busy() -> float:
        return 0.0 if gateway is None else gateway.cpu()

    began = busy()
    load = await offer(asking, in_flight=IN_FLIGHT, seconds=seconds)
    figures["us_per_request"] = 1e6 * (busy() - began) / load.answered
    figures["rps"], figures["p50"], figures["p99"] = load.rate, load.quantile(0.5), load.quantile(0.99)
    load = await offer(asking, in_flight=1, seconds=seconds / 2)
    figures["p50_alone"], figures["p99_alone"] = load.quantile(0.5), load.quantile(0.99)
    try:
        load = await offer(replace(paced, events=1), in_flight=1, seconds=seconds / 2)
        figures["first_event"] = load.quantile(0.5)
        figures["events"] = (
            load := await offer(streams, in_flight=STREAMS, seconds=seconds)
        ).events / load.seconds
        began = busy()
        load = await offer(paced, in_flight=PACED, seconds=seconds)
        figures["us_per_event"] = 1e6 * (busy() - began) / max(1, load.answered_events)
    except RuntimeError as error:
        sys.stdout.write(f"  no streams: {error}\n")
    return figures


async def compare(
    gateways: Mapping[str, Gateway], *, workers: int, rounds: int, seconds: float
) -> dict[str, Figures]:
    """Measure gateways in turns; gives the medians of each that could be had, and of the provider as `direct`."""
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    own_core = workers == 1
    with ExitStack() as stack:
        port = stack.enter_context(provider())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateways-")))
        running: dict[str, Running | None] = {"direct": None}
        for name, gateway in gateways.items():
            try:
                running[name] = stack.enter_context(
                    start(gateway, folder / name, port, workers=workers, cores=_GATEWAY if own_core else None)
                )
            except NotToBeHadError as error:
                sys.stdout.write(f"  {name} is left out: {error}\n")
        if own_core:
            stack.enter_context(affinity(_REST))
        for turn in range(rounds + 1):  # the first is for warming up
            for name, one in running.items():
                asking = Asking(port=port) if one is None else one.asking
                try:
                    figures = await measure(asking, one, seconds if turn else seconds / 4)
                except RuntimeError as error:
                    sys.stdout.write(f"  {name}, round {turn}: {error}\n")
                    continue
                for figure, value in figures.items() if turn else ():
                    taken[name][figure].append(value)
        for name, one in running.items():
            if one is not None:
                taken[name] |= {"memory_mb": [one.memory()], "start_s": [one.start_seconds]}
    return {
        name: {figure: statistics.median(values) for figure, values in of.items()}
        for name, of in taken.items()
    }


_COLUMNS = {
    "rps": "req/s",
    "us_per_request": "CPU us",
    "p50": "p50 ms",
    "p99": "p99 ms",
    "p50_alone": "alone p50",
    "p99_alone": "alone p99",
    "first_event": "1st event",
    "events": "events/s",
    "us_per_event": "us/event",
    "memory_mb": "MB",
    "start_s": "start s",
}


def show(figures: Mapping[str, Figures], workers: int) -> None:
    """Print a table."""
    sys.stdout.write(f"\n{workers} worker{'s' * (workers > 1)}: {IN_FLIGHT} in flight; latencies in ms\n")
    sys.stdout.write(
        f"{'':20}" + "".join(f"{title:>10}" for title in _COLUMNS.values()) + f"{'x nginx':>9}\n"
    )
    best = figures.get("nginx", {}).get("rps")
    for name, of in figures.items():
        cells = "".join(f"{of[column]:10.4g}" if column in of else f"{'-':>10}" for column in _COLUMNS)
        ratio = f"{of['rps'] / best:9.3f}" if best and "rps" in of else ""
        sys.stdout.write(f"{name:20}{cells}{ratio}\n")
    sys.stdout.flush()


def summary(figures: Mapping[str, Figures]) -> dict[str, float | None]:
    """Give the figures at one worker, under the names they are known by elsewhere; null for what could not be had."""
    direct = figures.get("direct", {})
    said: dict[str, float | None] = {}
    for name in GATEWAYS:
        of = figures.get(name, {})
        said[f"{name}_rps"] = _rounded(of.get("rps"))
        for quantile in ("p50", "p99"):
            said[f"{name}_added_{quantile}_ms"] = _less(of, direct, f"{quantile}_alone")
        said[f"{name}_added_first_event_ms"] = _less(of, direct, "first_event")
        for figure in ("us_per_request", "us_per_event", "events", "memory_mb", "start_s"):
            said[f"{name}_{figure}"] = _rounded(of.get(figure))
    return said


def _less(of: Figures, direct: Figures, figure: str) -> float | None:
    return round(of[figure] - direct[figure], 4) if figure in of and figure in direct else None


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else float(f"{figure:.4g}")


async def main(only: Sequence[str], *, full: bool) -> None:
    """Compare, print, and sum up."""
    gateways = {name: gateway for name, gateway in GATEWAYS.items() if not only or name in only}
    rounds, seconds = (5, 1.5) if full else (4, 0.17)  # rather more rounds: others' work comes in bursts
    if full:
        gateways |= {name: gateway for name, gateway in OBSERVED.items() if not only or name in only}
    figures = await compare(gateways, workers=1, rounds=rounds, seconds=seconds)
    show(figures, 1)
    said = summary(figures)
    if full:
        doubled = await compare(gateways, workers=2, rounds=rounds, seconds=seconds)
        show(doubled, 2)
        said |= {f"{name}_rps_2_workers": _rounded(doubled.get(name, {}).get("rps")) for name in GATEWAYS}
        said |= {f"{name}_rps": _rounded(figures.get(name, {}).get("rps")) for name in OBSERVED}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    if not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2:
        sys.exit("this benchmark needs Linux and two cores")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--full", action="store_true", help="longer rounds, with tracing, and two workers as well"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*GATEWAYS, *OBSERVED], default=(), help="some of the gateways"
    )
    given = parser.parse_args()
    run(main(given.only, full=given.full))
