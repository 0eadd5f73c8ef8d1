"""A gateway that runs: how it is started and waited for, and what it costs while it runs.

Linux only: what a process costs is read in /proc. Which gateways there are is not seen here. No benchmark itself.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks._children import Watch
from benchmarks._sidecar_load import Asking
from benchmarks._sidecar_upstream import ANSWER

__all__ = [
    "BEARER",
    "KEY",
    "Command",
    "Gateway",
    "NotToBeHadError",
    "Place",
    "Running",
    "affinity",
    "free_port",
    "start",
]

KEY = "key-of-the-benchmark-0123456789"
BEARER = {"authorization": f"Bearer {KEY}"}
_PATIENCE = 90.0


class NotToBeHadError(Exception):
    """A gateway that cannot be installed, or does not start."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Say where a gateway is to run: its folder, its port, that of the provider, and by how many workers."""

    folder: Path
    port: int
    provider: int
    workers: int


Command: TypeAlias = Callable[[Place], Sequence[str]]
"""Write what configuration a gateway needs into its folder, and give the command that starts it."""


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Say how a gateway is had, started and asked."""

    command: Command
    get: Callable[[], object] = lambda: None
    """Install it, if it is not there; raises `OSError` and `subprocess.SubprocessError`."""
    headers: Callable[[int], Mapping[str, str]] = lambda _provider: BEARER
    path: str = "/v1/chat/completions"
    environ: Mapping[str, str] = field(default_factory=dict)
    most_workers: int = 64


@dataclass(frozen=True, kw_only=True)
class Running:
    """A gateway that answers."""

    asking: Asking
    start_seconds: float
    """Until it had answered its first request."""
    process: subprocess.Popen[bytes]

    def cpu(self) -> float:
        """Give the seconds of processor that it and its children have had."""
        return sum(map(_processor_time, self._family()))

    def memory(self) -> float:
        """Give the resident memory of all of it, in MB."""
        pages = sum(int(_stat(pid)[21]) for pid in self._family())
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def _family(self) -> list[int]:
        parents = {
            int(pid): int(fields[1])
            for pid in (path.name for path in Path("/proc").iterdir())
            if pid.isdigit() and (fields := _stat(int(pid)))
        }
        family = [self.process.pid]
        for pid in family:
            family += [child for child, parent in parents.items() if parent == pid]
        return family


def _processor_time(pid: int) -> float:
    """Give the seconds of processor that all threads of a process have had; 0 when it is gone."""
    # As clock_getcpuclockid(3) makes it; what /proc says is in hundredths of a second.
    clock = (~pid << 3) | 2
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def _stat(pid: int) -> list[str]:
    """Give the fields of a process after its name; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@contextmanager
def affinity(cores: set[int] | None) -> Iterator[None]:
    """Let what is started in here run on these cores only; `None` is all of them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores & before or before if cores else before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def start(
    gateway: Gateway, folder: Path, provider: int, *, workers: int = 1, cores: set[int] | None = None
) -> Iterator[Running]:
    """Start a gateway in front of the provider at a port, and wait for its first answer.

    Raises `NotToBeHadError` for one that cannot be installed or does not answer.
    """
    if workers > gateway.most_workers:
        raise NotToBeHadError(f"it has no {workers} workers")
    try:
        gateway.get()
    except (OSError, subprocess.SubprocessError) as error:
        raise NotToBeHadError(f"it could not be installed: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder=folder, port=free_port(), provider=provider, workers=workers)
    asking = Asking(
        port=place.port, path=gateway.path, headers=gateway.headers(provider), at_least=len(ANSWER) // 2
    )
    log = folder / "log"
    with affinity(cores), log.open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            list(gateway.command(place)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environ(gateway),
            start_new_session=True,
        )
    watch = Watch(process, group=True)
    try:
        _wait(asking, process, log)
        yield Running(asking=asking, start_seconds=time.perf_counter() - began, process=process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        watch.release()
        process.wait()


def _environ(gateway: Gateway) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**ours, "PYTHONPATH": str(Path(__file__).parent.parent), "BENCHMARK_KEY": KEY, **gateway.environ}


def _wait(asking: Asking, process: subprocess.Popen[bytes], log: Path) -> None:
    head, _, body = asking.request().partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    until = time.monotonic() + _PATIENCE
    said: object = None
    while time.monotonic() < until and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", asking.port, timeout=5)
        try:
            connection.request("POST", asking.path, body, headers)
            response = connection.getresponse()
            said = response.status, response.read()[:200]
            if response.status == 200:
                return
        except (OSError, http.client.HTTPException) as error:
            said = error
        finally:
            connection.close()
        time.sleep(0.005)
    last = log.read_text(errors="replace").strip()[-300:]
    raise NotToBeHadError(f"it does not answer: {said!r}; it says {last!r}")


def free_port() -> int:
    """Give a port that nobody has at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
