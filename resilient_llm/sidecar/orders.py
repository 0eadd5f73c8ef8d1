"""What a worker is told when it begins: the configuration, and what was changed by hand since.

Both are kept as a setup that no call ever comes to, and to which everything is done that is done to the workers'. So
it stands as theirs do, whatever a change or a reload came to there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from resilient_llm.sidecar.build import Setup, build
from resilient_llm.sidecar.check import Nowhere, built
from resilient_llm.sidecar.config import Config, located, parse, text_of
from resilient_llm.sidecar.desk import change
from resilient_llm.sidecar.files import aside
from resilient_llm.sidecar.handed_on import Standing, place, taken
from resilient_llm.sidecar.reload import after_restart, in_force
from resilient_llm.sidecar.tls import keep

if TYPE_CHECKING:
    from resilient_llm.sidecar.desk import Answer
    from resilient_llm.sidecar.tls import Kept

__all__ = ["Checked", "Orders"]

logger = logging.getLogger("resilient_llm")


class Checked(NamedTuple):
    """Hold what was read, and is known to work."""

    text: bytes
    config: Config
    tls: Kept | None
    trial: Setup
    """What workers make of it, in the place of what they had."""
    setup: Setup
    """That which stands as theirs do."""


class _Read(NamedTuple):
    """Hold what stands in the files, and what of it holds without a restart."""

    text: bytes
    config: Config
    running: Config
    tls: Kept | None


class Orders:
    """Hold what workers that begin are to be like. Raises `ConfigError`.

    And what their listeners show: that is what the others show, also where the files are broken now. All of it in one
    event loop.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._now = self._started_with = self._made(self._read())
        self._tls = self._now.tls

    @property
    def config(self) -> Config:
        """Give the configuration that they go by, but for what waits for a restart."""
        return self._now.config

    async def checked(self) -> Checked:
        """Read the file again, and make sure that it would work. Raises `ConfigError`."""
        return self._made(await aside(partial(self._read, self._started_with.config)), self._now)

    def _read(self, started: Config | None = None) -> _Read:
        with located(self.path):
            text = text_of(self.path)
            config = parse(text, file=str(self.path))
            running = config if started is None else in_force(started, config)
            return _Read(text, config, running, keep("server", config, self.path))

    def _made(self, given: _Read, before: Checked | None = None) -> Checked:
        text, config, running, tls = given
        of = (None, None) if before is None else (before.trial, before.setup)
        with located(self.path):
            trial = built(running, self.path, os.environ, previous=of[0])
            setup = build(_without_store(running), Nowhere(), previous=of[1])
        return Checked(text, config, tls, trial, setup)

    def take(self, checked: Checked) -> None:
        """Go by another configuration."""
        self._now = checked
        if "server.tls" not in after_restart(self._started_with.config, checked.config):
            self._tls = checked.tls

    def change(self, path: str, body: bytes) -> Answer | None:
        """Change something by hand; `None` for a path that is no change's."""
        with _unheard():
            return change(self._now.setup, path, body)

    def follow(self, path: str, answers: Sequence[bytes]) -> None:
        """Have a canary stand where a change of it has brought the workers', which may have stepped by themselves.

        Where they differ, as the one with the smallest share.
        """
        canary = self._now.setup.canaries.get(path.removeprefix("/admin/canary/"))
        if canary is not None and answers:
            came_to: list[Standing] = [json.loads(answer) for answer in answers]
            with _unheard():
                place(canary, min(came_to, key=lambda standing: standing["share"]))

    def first(self) -> Mapping[str, object]:
        """Give the message that a worker begins with."""
        return {
            "path": str(self.path),
            "started": self._started_with.text.decode(),
            "text": self._now.text.decode(),
            "tls": self._tls,
            "by_hand": taken(self._now.setup),
        }


def _without_store(config: Config) -> Config:
    """Have nothing kept in a store: what is shared there the workers tell it."""
    if config.store is None:
        return config
    return config.model_copy(update={"store": config.store.model_copy(update={"share": []})})


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Have nothing logged of what is done where no calls are: workers say it."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
