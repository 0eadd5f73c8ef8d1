"""Files that the configuration is in, or names: read where nothing waits for the disk, and never for what may not end.

What stands in them, and what is wrong with that, is not known here.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from anyio import to_thread

from resilient_llm.sidecar.problems import ConfigError, Problem

__all__ = ["aside", "content"]

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds, of the system's time, that files may take."""


def content(path: Path) -> bytes:
    """Read a file. Raises `OSError`, also for what is none: to read a pipe is to wait for whoever writes."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        return file.read()


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


async def aside(function: Callable[[], T]) -> T:
    """Call what reads files, and let the event loop go on meanwhile. Raises `ConfigError` if the disk hangs.

    And what it raises. A thread that hangs is left, and keeps nothing from ending.
    """
    return await to_thread.run_sync(partial(_in_time, function))


def _in_time(function: Callable[[], T]) -> T:
    done: Future[T] = Future()

    def do() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=do, name="files", daemon=True).start()
    try:
        return done.result(_PATIENCE)
    except TimeoutError:
        if done.done():
            raise
        why = f"files were not read after {_PATIENCE:g} seconds: the disk that they are on does not answer"
        raise ConfigError([Problem((), why)]) from None
