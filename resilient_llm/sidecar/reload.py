"""A new configuration in the place of the one that runs, from the file it came from.

The new one is whole before it takes the old one's place; a file that cannot work changes nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from resilient_llm.sidecar.config import Config, load, located
from resilient_llm.sidecar.problems import ConfigError, Problem

if TYPE_CHECKING:
    from resilient_llm.sidecar.app import Sidecar

__all__ = ["Reloaded", "Reloader"]

logger = logging.getLogger("resilient_llm")

_SOCKETS = ("host", "port", "max_head", "head_timeout", "max_connections", "drain_timeout")


class Reloaded:
    """What became of the last reload."""

    def __init__(self) -> None:
        self.count = 0
        self.error: str | None = None
        self.after_restart: list[str] = []
        """What is different in the file and takes effect only with the next start."""


class Reloader:
    """Read the file again and give the sidecar what it says."""

    def __init__(self, sidecar: Sidecar, path: Path) -> None:
        self._sidecar = sidecar
        self._path = path
        self._started_with = sidecar.setup.config
        self.last = Reloaded()

    async def __call__(self) -> Reloaded:
        """Do it. Raises `ConfigError`, and everything is as it was, for a file that cannot work."""
        try:
            with located(self._path):
                config = self._read()
                await self._sidecar.reload(config)
        except ConfigError as error:
            self.last.error = str(error)
            logger.error("the configuration was not reloaded: %s", error)  # noqa: TRY400 - it is the user's
            raise
        self.last.error = None
        self.last.count += 1
        self.last.after_restart = list(self._unchangeable(config))
        logger.info(
            "the configuration was reloaded", extra={"fields": {"after_restart": self.last.after_restart}}
        )
        return self.last

    def _read(self) -> Config:
        try:
            return load(self._path)
        except OSError as error:
            raise ConfigError(
                [Problem((), f"cannot be read: {error.strerror}")], file=str(self._path)
            ) from error

    def _unchangeable(self, config: Config) -> list[str]:
        before = self._started_with
        found = [
            f"server.{name}"
            for name in _SOCKETS
            if getattr(config.server, name) != getattr(before.server, name)
        ]
        found += [
            table for table in ("admin", "telemetry") if getattr(config, table) != getattr(before, table)
        ]
        return found
