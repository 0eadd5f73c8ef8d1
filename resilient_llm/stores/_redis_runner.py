"""What the parts of a `RedisStore` ask with: scripts and commands, to one server or to whichever keeps their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from resilient_llm.stores._redis_commands import Client, Reply, Request, Script, Word
from resilient_llm.stores.guard import StoreGuard

__all__ = ["Runner"]


class Runner(Protocol):
    """Ask servers, and tell them things; see `ScriptRunner`, which does for one."""

    guard: StoreGuard

    @property
    def used(self) -> bool:
        """Tell whether anything was asked, told or connected in this process."""
        ...

    @property
    def client(self) -> Client:
        """Give the client, for what cannot go in a batch, such as pub/sub."""
        ...

    def guard_of(self, key: Word) -> StoreGuard:
        """Give the guard of the server that keeps a key."""
        ...

    async def run(
        self,
        script: Script,
        keys: Sequence[Word],
        args: Sequence[Word] = (),
        *,
        orphan: Callable[[Reply], None] | None = None,
        unknown: Callable[[BaseException], None] | None = None,
    ) -> Reply:
        """Run a script and return its reply."""
        ...

    async def command(self, *words: Word, orphan: Callable[[Reply], None] | None = None) -> Reply:
        """Run one command and return its reply."""
        ...

    def send(
        self,
        script: Script,
        keys: Sequence[Word],
        args: Sequence[Word] = (),
        *,
        heard: Callable[[Reply], None] | None = None,
        again: Sequence[Word] | None = None,
        worth: float = 0.0,
    ) -> Request:
        """Run a script soon, without anybody waiting."""
        ...

    def send_command(self, *words: Word, heard: Callable[[Reply], None] | None = None) -> None:
        """Run one command soon, without anybody waiting."""
        ...

    def while_used(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back before a batch, at most every so many seconds."""
        ...

    def every(self, seconds: float, callback: Callable[[], bool]) -> None:
        """Call back in so many seconds and again after as many."""
        ...

    def end(self) -> None:
        """Let nothing more be asked; who waits for the store hears of it."""
        ...

    async def aclose(self) -> None:
        """Send what is to be told, for at most a second or ten timeouts."""
        ...

    def after_fork(self) -> None:
        """Hear, in the child, that what is under way is the parent's."""
        ...
