"""What several workers report, as one report: numbers that add up are added, of states the worst is told.

Pure. What is in a report is decided where it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["one_health", "one_routing", "one_text"]

Report: TypeAlias = Mapping[str, Any]

_CIRCUITS = ("isolated", "open", "half_open", "closed")
_KEYS = ("set_aside", "half_open", "resting", "living")
_MIXED = "mixed"


def one_text(texts: Mapping[int, str], restarts: Mapping[int, int]) -> str:
    """Make one page of metrics, in Prometheus' text format, of each worker's; every sample says whose it is."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for number, text in texts.items():
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# "):
                comments, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in comments:
                    comments.append(line)
            elif line:
                samples.append(_labelled(line, number))
    up, again = "resilient_llm_worker_up", "resilient_llm_worker_restarts_total"
    families[up] = (
        [f"# HELP {up} Whether a worker serves", f"# TYPE {up} gauge"],
        [f'{up}{{worker="{number}"}} {int(number in texts)}' for number in restarts],
    )
    families[again] = (
        [f"# HELP {again} Times that a worker was started again", f"# TYPE {again} counter"],
        [f'{again}{{worker="{number}"}} {times}' for number, times in restarts.items()],
    )
    return "".join(f"{line}\n" for parts in families.values() for part in parts for line in part)


def _labelled(sample: str, number: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{worker="{number}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{number}"}} {value}'


def one_health(reports: Sequence[Report]) -> dict[str, Any]:
    """Make one report of each worker's `GET /admin/health`, of which there is at least one.

    Latencies are means, weighted by attempts, but for p95 and p99, which are the worst worker's.
    """
    merged: dict[str, Any] = {
        **one_routing(reports),
        "draining": any(report["draining"] for report in reports),
        "running": sum(report["running"] for report in reports),
        "bulkheads": {
            name: {key: sum(one[key] for one in same) for key in same[0]}
            for name, same in _named(reports, "bulkheads").items()
        },
    }
    if canaries := _named(reports, "canaries"):
        merged["canaries"] = {name: _canary(same) for name, same in canaries.items()}
    return merged


def one_routing(reports: Sequence[Report]) -> dict[str, Any]:
    """Make one report of each router's, of which there is at least one."""
    attempts = sum(report["attempts"] for report in reports)
    failures = sum(report["failures"] for report in reports)
    return {
        "attempts": attempts,
        "failures": failures,
        "success_ratio": 1 - failures / attempts if attempts else None,
        "latency": _latency(reports),
        "targets": [
            _target(same)
            for same in _by(("name", "model"), (report["targets"] for report in reports)).values()
        ],
    }


def _named(reports: Sequence[Report], key: str) -> dict[str, list[Report]]:
    """Give what each worker reports by each name; in the midst of a reload not all of them know the same names."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        for name, one in report.get(key, {}).items():
            found.setdefault(name, []).append(one)
    return found


def _by(keys: Sequence[str], lists: Iterable[Iterable[Report]]) -> dict[tuple[Any, ...], list[Report]]:
    found: dict[tuple[Any, ...], list[Report]] = {}
    for reports in lists:
        for report in reports:
            found.setdefault(tuple(report[key] for key in keys), []).append(report)
    return found


def _target(same: Sequence[Report]) -> dict[str, Any]:
    return {
        **same[0],
        "healthy": all(one["healthy"] for one in same),
        "circuit": _worst(_CIRCUITS, [one["circuit"] for one in same]),
        "in_flight": sum(one["in_flight"] for one in same),
        "attempts": sum(one["attempts"] for one in same),
        "failures": sum(one["failures"] for one in same),
        "success_ratio": _mean(same, "success_ratio"),
        "time_to_first_token": _mean(same, "time_to_first_token"),
        "latency": _latency(same),
        "cooling_down": max(one["cooling_down"] for one in same),
        "credentials": [
            _credential(keys) for keys in _by(("name",), (one["credentials"] for one in same)).values()
        ],
        "effective_weight": _mean(same, "effective_weight"),
        "limit": sum(limits)
        if (limits := [one["limit"] for one in same if one["limit"] is not None])
        else None,
        "by_hand": list(dict.fromkeys(what for one in same for what in one["by_hand"])),
    }


def _credential(same: Sequence[Report]) -> dict[str, Any]:
    return {
        **same[0],
        "state": _worst(_KEYS, [one["state"] for one in same]),
        "in_flight": sum(one["in_flight"] for one in same),
        "back_in": max(one["back_in"] for one in same),
    }


def _canary(same: Sequence[Report]) -> dict[str, Any]:
    def common(key: str) -> Any:  # noqa: ANN401 - whatever is reported
        values = [one[key] for one in same]
        return values[0] if all(value == values[0] for value in values) else None

    return {
        **same[0],
        "state": common("state") or _MIXED,
        "share": round(sum(one["share"] for one in same) / len(same), 9),  # of 0.1 a mean is 0.1
        "step": common("step"),
        "waits_for": common("waits_for"),
        "restarts_in": common("restarts_in"),
        **{
            seen: {key: sum(one[seen][key] for one in same) for key in ("calls", "errors", "client_errors")}
            for seen in ("seen", "seen_of_baseline")
        },
    }


def _worst(order: Sequence[str], states: Sequence[str | None]) -> str | None:
    return next((state for state in order if state in states), None)


def _mean(same: Sequence[Report], key: str) -> float | None:
    """Give the mean of what is known, each weighted by its attempts, and one more."""
    known = [(one[key], one["attempts"] + 1) for one in same if one[key] is not None]
    if len(known) == 1:
        return float(known[0][0])
    return (
        sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None
    )


def _latency(same: Sequence[Report]) -> dict[str, Any] | None:
    known = [{**one["latency"], "attempts": one["attempts"]} for one in same if one["latency"] is not None]
    if not known:
        return None
    return {
        "mean": _mean(known, "mean"),
        "p50": _mean(known, "p50"),
        "p95": max(one["p95"] for one in known),
        "p99": max(one["p99"] for one in known),
    }
