"""Programs that must be told a port, which somebody else may take before they do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks._children import Watch

__all__ = ["answering"]

_TRIES = 3
_PATIENCE = 60.0
"""Seconds after which a program that has not answered hangs."""


@contextmanager
def answering(
    start: Callable[[], subprocess.Popen[bytes]], answers: Callable[[], bool]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run what `start` starts, once it answers; one that ends before is started again, on ports that `start` finds.

    Raises RuntimeError when none does.
    """
    with ExitStack() as stack:
        for _ in range(_TRIES):
            process = start()
            stack.callback(_end, process, Watch(process))
            if _comes_up(process, answers):
                break
        else:
            raise RuntimeError(f"{process.args!r} does not come up: exit code {process.poll()}")
        yield process


def _comes_up(process: subprocess.Popen[bytes], answers: Callable[[], bool]) -> bool:
    until = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < until:
        if answers():
            return True
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes], watch: Watch) -> None:
    watch.release()
    process.kill()
    process.wait()
