"""The processes of a soak: the sidecar, two providers, a store; each can be killed, frozen and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks._children import Watch
from benchmarks._valkey import Valkey

_PATIENCE = 60.0
KEYS = {name: f"key-of-{name}-0123456789" for name in ("acme", "bolt", "over")}
PROVIDER_KEY = "key-of-the-provider-0123456789"

GATEWAY = """
[server]
port = 0
deadline = 20
body_timeout = 5
send_timeout = 5
[admin]
port = 0
[tenants.acme]
key_env = "SOAK_ACME"
weight = {weight}
[tenants.bolt]
key_env = "SOAK_BOLT"
[tenants.bolt.bulkhead]
max_concurrent = 3
max_wait = 0.5
[tenants.over]
key_env = "SOAK_OVER"
quota = {{requests_per_minute = 60, max_wait = 0}}
[bulkhead]
max_concurrent = 50
shared = 60
max_wait = 5
[store]
redis_env = "SOAK_STORE"
timeout = 0.5
on_error = "local"
[retry]
max_attempts = 3
[routing]
cool_down = 2.0
[models.soak]
targets = ["one", "two"]
"""
TARGET = """
[targets.{name}]
url = "{url}/v1"
api_key_env = "SOAK_PROVIDER"
circuit = {{break_duration = 1.0}}
timeouts = {{first_content = 2.0, content_gap = 2.0, whole_reply = 8.0}}
"""


class Program:
    """A process that does not outlive this one."""

    def __init__(self, command: list[str], env: dict[str, str], *, log: Path) -> None:
        self._command = [sys.executable, "-m", *command]
        self._env = {**os.environ, **env}
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._watch: Watch | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        """Give the process that runs."""
        assert self._process is not None
        return self._process

    def start(self, *, read: bool = False) -> None:
        """Start it; with `read` its standard output is to be read."""
        with self._log.open("ab") as log:
            out = subprocess.PIPE if read else log
            self._process = subprocess.Popen(self._command, stdout=out, stderr=log, env=self._env, text=True)
        self._watch = Watch(self._process)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        if self._watch is not None:
            self._watch.release()
            self._watch = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


class Upstream(Program):
    """A provider on a port of its own."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name = name
        self.ledger = folder / f"{name}.ledger"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = ["tests.soak.provider", str(self.port), name, str(self.ledger), str(seed)]
        super().__init__(command, {}, log=folder / f"{name}.log")

    def start(self, *, read: bool = False) -> None:
        """Start it, and wait until it answers; again where somebody else has the port for a moment."""

        def answers() -> bool:
            if self.process.poll() is not None:
                self.kill()
                Program.start(self, read=read)
            return httpx.get(f"{self.url}/v1/models").is_success

        super().start(read=read)
        _wait(answers, f"provider {self.name}")

    def given(self) -> dict[str, dict[str, Any]]:
        """Read what it has given out in full, by where it came from."""
        if not self.ledger.exists():
            return {}
        lines = [json.loads(line) for line in self.ledger.read_text().splitlines() if line.endswith("}")]
        return {line["from"]: line for line in lines}


class Gateway(Program):
    """The sidecar, and each line it writes."""

    def __init__(self, file: Path, folder: Path, store: str) -> None:
        self.file = file
        self.lines: list[dict[str, Any]] = []
        keys = {f"SOAK_{name.upper()}": key for name, key in KEYS.items()}
        env = {**keys, "SOAK_PROVIDER": PROVIDER_KEY, "SOAK_STORE": store, "PYTHONUNBUFFERED": "1"}
        super().__init__(
            ["resilient_llm.cli", "serve", "--config", str(file)], env, log=folder / "sidecar.log"
        )
        self.url = self.admin = ""

    def start(self, *, read: bool = True) -> None:
        """Start it, and wait until it listens."""
        super().start(read=read)
        threading.Thread(target=self._read, daemon=True).start()
        _wait(lambda: any(line["message"] == "listening" for line in self.lines), "the sidecar")
        line = next(line for line in self.lines if line["message"] == "listening")
        self.url, self.admin = line["url"], line["admin_url"]

    def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        with suppress(ValueError):  # it was closed
            for line in stdout:
                self.lines.append(json.loads(line))

    def requests(self) -> list[dict[str, Any]]:
        """Give the access log."""
        return [line for line in self.lines if line["logger"] == "resilient_llm.access"]


class World:
    """All of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.store = Valkey()
        self.upstreams = [Upstream(name, folder, seed + number) for number, name in enumerate(("one", "two"))]
        self.file = folder / "gateway.toml"
        self.write()
        self.gateway = Gateway(self.file, folder, self.store.url)

    def write(self, *, weight: float = 1.0) -> None:
        """Write a configuration that can work."""
        targets = [TARGET.format(name=each.name, url=each.url) for each in self.upstreams]
        self.file.write_text(GATEWAY.format(weight=weight) + "".join(targets))


@contextmanager
def world(folder: Path, seed: int) -> Iterator[World]:
    """Start everything, and end it."""
    made = World(folder, seed)
    with ExitStack() as stack:
        stack.enter_context(made.store)
        for program in (*made.upstreams, made.gateway):
            stack.callback(program.kill)
            program.start(read=program is made.gateway)
        yield made


def _wait(until: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if until():
                return
        time.sleep(0.05)
    raise RuntimeError(f"{what} did not start")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
