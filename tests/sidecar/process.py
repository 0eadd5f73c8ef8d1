"""`resilient-llm serve` as a process of its own, and what it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["PORTS", "Gate", "Process", "started", "until"]

PORTS = "[server]\nport = 0\ndrain_timeout = 50\n[admin]\nport = 0\n"
PATIENCE = 60.0
"""Seconds after which something hangs; no test depends on how fast it is before."""


class Process:
    """A sidecar of its own, and the lines it writes."""

    def __init__(self, file: Path, *options: str, **environ: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "resilient_llm.cli", "serve", "--config", str(file), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a signal can be sent to all of its processes, and to no others
            env={**os.environ, "PYTHONWARNINGS": "default", **environ},
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def wait_for(self, message: str, count: int = 1) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = [line for line in self.lines if line["message"].startswith(message)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.01)
        raise AssertionError(f"{message!r} was not logged: {self.lines}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        self._reader.join(PATIENCE)
        _, stderr = self._process.communicate(timeout=PATIENCE)
        return self._process.returncode, stderr

    def kill(self) -> None:
        self._process.kill()
        self._reader.join(PATIENCE)
        self._process.communicate(timeout=PATIENCE)


class Gate:
    """A provider whose streams stop after a few pieces until all are let on, from any thread."""

    PIECES = 4
    """What a sidecar passes on before: it waits for content, which the first piece has none of."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._opened = threading.Event()

    def open(self) -> None:
        """Let all replies on, for good."""
        self._opened.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = 0

        async def held(message: Message) -> None:
            nonlocal pieces
            await send(message)
            pieces += bool(message.get("more_body"))
            if pieces == self.PIECES:
                while not self._opened.is_set():  # noqa: ASYNC110 - it is opened by another thread
                    await anyio.sleep(0.01)

        await self._app(scope, receive, held)


@contextmanager
def started(file: Path, *options: str, **environ: str) -> Iterator[tuple[Process, str, str]]:
    process = Process(file, *options, **environ)
    try:
        line = process.wait_for("listening")
        yield process, line["url"], line["admin_url"]
    finally:
        process.kill()


def until(what: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
