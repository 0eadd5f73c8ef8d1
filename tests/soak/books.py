"""The books of a soak: what clients got, what the access log says, and what providers gave have to agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tests.soak.replies import Got

Line = Mapping[str, Any]

_OUTCOMES = {
    "ok": {"ok"},
    "error": {"error", "refused"},
    "event": {"error"},
    "broken": {"error"},
    "left": {"ok", "error", "refused", "cancelled"},
}
"""What the log may say of a request by what its client saw."""


def check(results: Iterable[Got], log: Iterable[Line], given: Mapping[str, Line]) -> list[str]:
    """Say what does not agree."""
    problems: list[str] = []
    lines: dict[str, list[Line]] = defaultdict(list)
    for line in log:
        lines[line["request_id"]].append(line)
    origins: Counter[str] = Counter()
    for got in results:
        entries = lines.pop(got.id, [])
        if len(entries) != 1:
            problems.append(f"{got}: {len(entries)} lines in the access log")
            continue
        problems += [
            f"{got}, logged as {dict(entries[0])}: {why}" for why in _differences(got, entries[0], given)
        ]
        if got.what == "ok" and got.origin is not None:
            origins[got.origin] += 1
    problems += [f"a request that nobody made: {dict(line)}" for rest in lines.values() for line in rest]
    problems += [
        f"{count} clients got the one reply {origin}" for origin, count in origins.items() if count > 1
    ]
    return problems


def _differences(got: Got, line: Line, given: Mapping[str, Line]) -> Iterable[str]:
    if got.what not in _OUTCOMES:
        yield "it is not well-formed, or not its own"
        return
    if line["outcome"] not in _OUTCOMES[got.what]:
        yield f"its outcome is {line['outcome']}"
    if got.what != "left" and line["status"] != got.status:
        yield f"its status is {line['status']}"
    if got.what == "ok":
        told = None if got.origin is None else given.get(got.origin)
        if told is None:
            yield f"no provider gave it ({got.origin})"
        elif told["id"] != got.id:
            yield f"it was given to {told['id']}"
        elif (line["input_tokens"], line["output_tokens"] or 0) != (told["input"], told["output"]):
            yield f"the provider gave {told['input']} and {told['output']} tokens"


def usage(results: Iterable[Got], log: Iterable[Line], given: Mapping[str, Line]) -> tuple[int, int]:
    """Add up the tokens of completed calls: as logged, and as given."""
    done = {got.id: got.origin for got in results if got.what == "ok"}
    logged = sum(
        (line["input_tokens"] or 0) + (line["output_tokens"] or 0)
        for line in log
        if line["request_id"] in done
    )
    origins = [origin for origin in done.values() if origin in given]
    return logged, sum(given[origin]["input"] + given[origin]["output"] for origin in origins if origin)
