"""A Prometheus of one's own, for as long as a block runs: on a free port, asked through its HTTP API."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import httpx
import pytest

from benchmarks._children import Watch

__all__ = ["Prometheus", "program", "running"]

T = TypeVar("T")

_TRIES: Final = 3
"""Another program may take the free port before Prometheus does."""
_START_TIMEOUT: Final = 60.0


def program(name: str) -> str:
    """Find `prometheus` or `promtool` on PATH, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH (apt-get install prometheus)")
    return found


class Prometheus:
    """A Prometheus that runs."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def ready(self) -> bool:
        """Tell whether it answers queries."""
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate an expression now: its series, each with `metric` and `value`. Raises ValueError when it is none."""
        result: list[dict[str, Any]] = self._get("/api/v1/query", query=expression)["result"]
        return result

    def label_values(self, label: str, series: str) -> list[str]:
        """Give the values that a label has in some series, as a variable of a dashboard asks for them."""
        values: list[str] = self._get(f"/api/v1/label/{label}/values", **{"match[]": series})
        return values

    def rules(self) -> list[dict[str, Any]]:
        """Give the rules it has, each with its `query`, `health` and last error."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def targets(self) -> dict[str, str]:
        """Give the health of each job's target: `up`, `down`, or `unknown` before the first scrape."""
        return {
            target["labels"]["job"]: target["health"]
            for target in self._get("/api/v1/targets")["activeTargets"]
        }

    def wait_for(self, ask: Callable[[], T], done: Callable[[T], bool], *, timeout: float = 60.0) -> T:
        """Ask until the answer will do, and give it; what was counted is not scraped at once."""
        until = time.monotonic() + timeout
        while not done(answer := ask()):
            assert time.monotonic() < until, f"after {timeout:g} s the answer still is {answer!r}"
            time.sleep(0.1)
        return answer

    def close(self) -> None:
        """Close the connections to it."""
        self._client.close()

    def _get(self, path: str, **params: str) -> Any:
        answer = self._client.get(path, params=params).json()
        if answer["status"] != "success":
            raise ValueError(f"{answer['error']}: {params}")
        return answer["data"]


@contextmanager
def running(config: Path) -> Iterator[Prometheus]:
    """Run Prometheus with a configuration. Raises RuntimeError when it does not start."""
    command = program("prometheus")
    with ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        for attempt in range(1, _TRIES + 1):
            port = _free_port()
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                [
                    command,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={data}/{attempt}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_stop, process, Watch(process))
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            stack.callback(prometheus.close)
            if _started(prometheus, process):
                break
        else:
            raise RuntimeError(f"Prometheus does not start:\n{_tail(log)}")
        yield prometheus


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _started(prometheus: Prometheus, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + _START_TIMEOUT
    while process.poll() is None and time.monotonic() < until:
        if prometheus.ready():
            return True
        time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes], watch: Watch) -> None:
    watch.release()
    process.kill()  # its data is thrown away
    process.wait()


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-2000:]
