"""What is sent to a Redis or Valkey server: scripts, commands, and what waits for their replies.

How they get there is `_redis_scripts`'.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, TypeAlias

from resilient_llm.core.circuit import Admission

__all__ = ["Client", "Reply", "Request", "Script", "Word"]

Word: TypeAlias = bytes | str | int | float
"""What a command is made of."""

Reply: TypeAlias = Any
"""What the server said: bytes for strings, whatever the client was told to decode."""


class Client(Protocol):
    """What is asked of a client: `redis.asyncio.Redis`, of Sentinel's too, or `RedisCluster`."""

    def pubsub(self) -> Any:  # noqa: ANN401 - each client has its own
        """Make a subscriber."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class Script:
    """Hold the text of a script, of one or several files in `stores/lua`, and its SHA-1."""

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str, source: bytes) -> None:
        self.name = name
        self.source = source
        self.sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()

    @staticmethod
    @cache
    def load(*names: str) -> Script:
        """Load `stores/lua/<name>.lua`; of several the first are what the last needs."""
        folder = files("resilient_llm.stores") / "lua"
        return Script(names[-1], b"\n".join((folder / f"{name}.lua").read_bytes() for name in names))


class Request:
    """One command on its way: `future` is for whoever waits, `heard` for the reply that nobody waits for.

    What is not yet `sent` may be changed. One that may or may not have been carried out is sent again with the words
    `again`, where that does no harm, until `worth_until` in the event loop's time; for one that somebody waits for
    `unknown` is called instead, and `never` where it certainly was not, and will not be.
    """

    __slots__ = (
        "admission",
        "again",
        "expires",
        "future",
        "heard",
        "never",
        "script",
        "sent",
        "unknown",
        "words",
        "worth_until",
    )

    def __init__(
        self, words: Sequence[Word], script: Script | None, heard: Callable[[Reply], None] | None
    ) -> None:
        self.words = words
        self.script = script
        self.heard = heard
        self.future: asyncio.Future[Reply] | None = None
        self.admission: Admission | None = None
        self.expires = math.inf
        self.sent = False
        self.again: Sequence[Word] | None = None
        self.worth_until = -math.inf
        self.unknown: Callable[[BaseException], None] | None = None
        self.never: Callable[[], None] | None = None

    def command(self, *, by_source: bool = False) -> Sequence[Word]:
        """Give the words to send; a script by its SHA-1, or in full."""
        if self.script is None:
            return self.words
        if by_source:
            return ("EVAL", self.script.source, *self.words)
        return ("EVALSHA", self.script.sha, *self.words)
