"""A new configuration in the place of the one that runs, from the file it came from.

The new one is whole before it takes the old one's place; a file that cannot work changes nothing. What waits for a
restart is as it was until then, and what is open now is judged by that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from resilient_llm.sidecar.config import Config, key_hashes, located, parse, text_of
from resilient_llm.sidecar.files import aside
from resilient_llm.sidecar.fit import misfits
from resilient_llm.sidecar.problems import ConfigError, Problem
from resilient_llm.sidecar.tls import LISTENERS, ListenerName, renew

if TYPE_CHECKING:
    from resilient_llm.sidecar.app import Sidecar
    from resilient_llm.sidecar.observability import Observability
    from resilient_llm.sidecar.tables import TLS, Admin
    from resilient_llm.sidecar.tls import Certificates

__all__ = ["ReloadDefectError", "Reloaded", "Reloader", "after_restart", "in_force"]

logger = logging.getLogger("resilient_llm")

_SOCKETS = (
    "host",
    "port",
    "workers",
    "max_head",
    "head_timeout",
    "send_timeout",
    "max_connections",
    "drain_timeout",
)
"""What of a server takes effect with its next start."""


class ReloadDefectError(Exception):
    """A reload that met a defect, which is in the log; everything is as it was."""


class Reloaded:
    """What became of the last reload."""

    def __init__(self) -> None:
        self.count = 0
        self.error: str | None = None
        self.after_restart: list[str] = []
        """What is different in the file and takes effect only with the next start."""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Note and log what goes wrong inside; of a defect whoever asked need not know more than that there is one.

        Raises `ConfigError` as it is, and `ReloadDefectError` for all else.
        """
        try:
            yield
        except ConfigError as error:
            self.error = str(error)
            logger.error("the configuration was not reloaded: %s", error)  # noqa: TRY400 - it is the user's
            raise
        except Exception as error:
            self.error = f"it met a defect, {type(error).__name__}; the log says where"
            logger.exception("the configuration was not reloaded: it met a defect")
            raise ReloadDefectError(self.error) from error


class Reloader:
    """Read the file again and give the sidecar what it says."""

    def __init__(
        self, sidecar: Sidecar, path: Path, *tls: Certificates | None, seen: Observability | None = None
    ) -> None:
        self._sidecar = sidecar
        self._path = path
        self._tls = tls
        self._seen = seen
        self._started_with = sidecar.setup.config
        self.last = Reloaded()
        self._one_by_one = anyio.Lock()

    async def __call__(self, text: bytes | None = None) -> Reloaded:
        """Do it, or take a `text` for what is in the file.

        Raises `ConfigError`, and everything is as it was, for what cannot work, and `ReloadDefectError`.
        """
        async with self._one_by_one:
            return await self._reload(text)

    async def _reload(self, text: bytes | None) -> Reloaded:
        with self.last.attempt():
            config, running, show = await aside(partial(self._read, text))
            with located(self._path):
                await self._sidecar.reload(running)
        show()
        if self._seen is not None:
            self._seen.relabel(running)
        self.last.error = None
        self.last.count += 1
        self.last.after_restart = after_restart(self._started_with, config)
        logger.info(
            "the configuration was reloaded", extra={"fields": {"after_restart": self.last.after_restart}}
        )
        return self.last

    def _read(self, text: bytes | None) -> tuple[Config, Config, Callable[[], None]]:
        """Give what the file says, what of it holds without a restart, and what shows the certificates it names."""
        with located(self._path):
            config = parse(text_of(self._path) if text is None else text, file=str(self._path))
            return config, in_force(self._started_with, config), renew(self._tls, config)


def in_force(started: Config, given: Config) -> Config:
    """Give what holds of a configuration in what was started with another: the rest of it waits for a restart.

    Raises `ConfigError` where that does not fit together. What is bound to an address stays there, and whoever has the
    token that it was started with is an operator, whatever the file says meanwhile.
    """
    kept_of_server = {name: getattr(started.server, name) for name in _SOCKETS}
    tls = {
        listener: getattr(started if _waits(listener, started, given) else given, listener).tls
        for listener in LISTENERS
    }
    found = given.model_copy(
        update={
            "server": given.server.model_copy(update={**kept_of_server, "tls": tls["server"]}),
            "admin": started.admin.model_copy(update={"tls": tls["admin"]}),
            "telemetry": started.telemetry,
        }
    )
    key_hashes(given)  # which the next start has to make
    problems = list(misfits(found))
    try:
        key_hashes(found)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError([_until_restart(problem) for problem in problems])
    return found


def _until_restart(problem: Problem) -> Problem:
    return problem._replace(message=f"holds until a restart: {problem.message}")


def after_restart(before: Config, after: Config) -> list[str]:
    """Give what is different between configurations and takes effect only with the next start."""
    found = [
        f"server.{name}" for name in _SOCKETS if getattr(after.server, name) != getattr(before.server, name)
    ]
    found += [f"{listener}.tls" for listener in LISTENERS if _waits(listener, before, after)]
    if _but_for_tls(before.admin) != _but_for_tls(after.admin):
        found.append("admin")
    if before.telemetry != after.telemetry:
        found.append("telemetry")
    return found


def _waits(listener: ListenerName, before: Config, after: Config) -> bool:
    return _kind_of_tls(listener, before) != _kind_of_tls(listener, after)


def _kind_of_tls(listener: ListenerName, config: Config) -> tuple[bool, bool]:
    options: TLS | None = getattr(config, listener).tls
    return options is not None, options is not None and options.client_ca is not None


def _but_for_tls(options: Admin) -> Admin:
    return options.model_copy(update={"tls": None})
