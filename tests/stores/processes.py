"""Processes that draw on one limit, and what the servers noted of it: for tests of stores."""

from __future__ import annotations

import itertools
import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._children import Watch

__all__ = ["CAPACITY", "RATE", "Note", "Setting", "Workers", "most_missing", "order", "used_ratio"]

ROOT = Path(__file__).parents[2]
RATE = 300.0
CAPACITY = 150.0


class Workers:
    """Processes that are started once, and do what they are told."""

    def __init__(self, count: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.stores.worker"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for _ in range(count)
        ]
        self._watches = [Watch(each) for each in self.processes]
        for each in self.processes:
            assert self._line(each) == "ready"

    def tell(self, order: dict[str, Any]) -> None:
        """Give all of them the same order."""
        for seed, process in enumerate(self.processes):
            assert process.stdin is not None
            process.stdin.write(json.dumps({"seed": seed, "start": time.monotonic() + 0.3} | order) + "\n")

    def hear(self) -> list[dict[str, Any]]:
        """Hear what each has done."""
        with ThreadPoolExecutor(len(self.processes)) as pool:
            return [json.loads(line) for line in pool.map(self._line, self.processes)]

    def run(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        self.tell(order)
        return self.hear()

    def close(self) -> None:
        for watch in self._watches:
            watch.release()
        for process in self.processes:
            process.kill()
            process.communicate()

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


class Note(NamedTuple):
    """What one script did: what was taken of each bucket, or given back if it is less than 0."""

    at: float
    taken: Sequence[float]
    grant: bool


@dataclass
class Setting:
    """A server, or a cluster, and how it is reached."""

    url: str
    cluster: bool
    read: Callable[[], Any]

    def notes(self, prefix: str) -> list[Note]:
        """Give all that was done with a bucket, in order."""
        with self.read() as admin:
            (key,) = [key for key in admin.keys(f"{prefix}*:notes") if key.endswith(b":notes")]
            packed = admin.lrange(key, 0, -1)
        notes = []
        for each in packed:
            at, kind, *amounts = struct.unpack(f"<{len(each) // 8}d", each)
            notes.append(Note(at, amounts if kind == 1 else [-amount for amount in amounts], kind == 1))
        return notes

    def buckets(self, prefix: str) -> list[bytes]:
        with self.read() as admin:
            return [key for key in admin.keys(f"{prefix}*rate*") if not key.endswith(b":notes")]


prefixes = (f"test{number}:" for number in itertools.count())


def order(setting: Setting, caller: str, **options: Any) -> dict[str, Any]:
    prefix = next(prefixes)
    return {
        "url": setting.url,
        "cluster": setting.cluster,
        "home": f"{prefix}{{home}}",
        "prefix": prefix,
        "caller": caller,
        "callers": 3,
        "seconds": 2.0,
        "limit": {"requests_per_minute": RATE * 60, "window": CAPACITY / RATE, "max_wait": 0},
    } | options


def most_missing(notes: Sequence[Note], rate: float, capacity: float = math.inf) -> float:
    """Say by how much grants in any seconds T exceeded rate * T at most: the capacity that was needed for them.

    What is charged afterwards leaves a debt of one `capacity` at most.
    """
    return max(after for note, _, after in replayed(notes, rate, capacity) if note.grant)


def used_ratio(notes: Sequence[Note], rate: float, capacity: float, since: float, until: float) -> float:
    """Say what part was granted of all that could be, in a time in which everybody wanted more."""
    before, last = 0.0, since
    granted = 0.0
    for note, _, after in replayed(notes, rate, capacity):
        if note.at < since:
            before, last = after, note.at
        elif note.at <= until:
            granted += note.taken[0]
    missing = max(0.0, before - (since - last) * rate)
    return granted / (capacity - missing + rate * (until - since))


def replayed(notes: Sequence[Note], rate: float, capacity: float) -> Iterator[tuple[Note, float, float]]:
    """Give each note with what was missing before and after it."""
    missing, last = 0.0, notes[0].at
    for note in notes:
        before = max(0.0, missing - (note.at - last) * rate)
        last = note.at
        missing = max(0.0, before + note.taken[0])
        if not note.grant:
            missing = min(missing, max(before, 2 * capacity))
        yield note, before, missing
