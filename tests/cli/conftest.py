"""The command line as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `resilient-llm` with arguments; what still runs after the test is killed."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "resilient_llm.cli", *arguments],
                cwd=ROOT,
                env={**os.environ, "COLUMNS": "80"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read the process's output up to the line that has the text, and return that line."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the output ended without {text!r}: {process.communicate()[1]}")


def stop(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[str, str]:
    """Send a signal, wait for the end, and return the rest of what was written to stdout and stderr."""
    process.send_signal(number)
    return process.communicate(timeout=100)
