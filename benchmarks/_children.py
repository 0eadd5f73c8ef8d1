"""Processes that do not outlive the one that started them, however that ends."""

from __future__ import annotations

import subprocess

__all__ = ["Watch"]


class Watch:
    """Kill a process, or its whole `group`, when this one is gone: somebody watches a pipe that only this one holds.

    `release` it before the process is waited for, when its number may become another's.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | subprocess.Popen[str], *, group: bool = False
    ) -> None:
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _ || kill -KILL "$0"', f"{'-' * group}{process.pid}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Watch no longer."""
        self._watcher.kill()
        self._watcher.communicate()
