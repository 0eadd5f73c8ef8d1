"""Carry scripts and commands to a Redis or Valkey server: batched, bounded in time, never poisoning a connection.

Every part of a `RedisStore` (rate limits, leases, circuits, values) asks through here; what the scripts mean must not
enter. Requires the extra `redis`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio

from resilient_llm._loop import LoopBound
from resilient_llm.errors import EventLoopError
from resilient_llm.stores._fork import set_aside
from resilient_llm.stores._redis_commands import Client, Reply, Request, Script, Word
from resilient_llm.stores._redis_sender import Regular, Sender, hand_over
from resilient_llm.stores._redis_transport import Transport
from resilient_llm.stores.guard import StoreGuard

__all__ = ["Client", "Regular", "Reply", "Script", "ScriptRunner", "Word"]

logger = logging.getLogger("resilient_llm")

_PATIENCE: Final = 1.0
"""Seconds (or 10 timeouts, if that is more) after which a connection is given up."""


class ScriptRunner:
    """Ask a server, and tell it things, in batches.

    What is asked at the same time goes in one pipeline, whose connection belongs to a task of the runner's: a caller
    that is cancelled or runs out of time leaves nobody a reply that is not theirs, and few connections do. Such a
    task lives only while something is to be sent. A script that the server does not know is sent in full, once, and
    its neighbours are not run again. Nothing else is sent twice, but what says that it does no harm.

    `connect` makes the client, for each event loop that uses the store in turn, or gives one that is the caller's (not
    `owned`); connections are the store's own in any case, made as the client's are. `timeout` is how many seconds a
    caller waits. Whether the store is asked at all, `guard` says. Works on asyncio only, as redis-py does.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        *,
        guard: StoreGuard,
        timeout: float,
        owned: bool = True,
        transport: Callable[[Any, float], Transport] | None = None,
        regular: list[Regular] | None = None,
    ) -> None:
        self.guard = guard
        self._connect = connect
        self._timeout = timeout
        self._owned = owned
        self._reach = transport or _reach
        self._client: Client | None = None
        self._transport: Transport | None = None
        self._waiting: deque[Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop = LoopBound(guard.name, self._reset)
        self._running: asyncio.AbstractEventLoop | None = None
        self._parents: asyncio.AbstractEventLoop | None = None
        self._regular = [] if regular is None else regular
        self.sender = Sender(guard, self._reached, self._regular)

    @property
    def used(self) -> bool:
        """Tell whether anything was asked, told or connected in this process."""
        return self._running is not None

    @property
    def client(self) -> Client:
        """Give the client, for what cannot go in a batch, such as pub/sub; made in the running event loop."""
        self._bind()
        if self._client is None:
            self._client = self._connect()
        return self._client

    def guard_of(self, _key: Word) -> StoreGuard:
        """Give the guard of the server that keeps a key."""
        return self.guard

    async def run(
        self,
        script: Script,
        keys: Sequence[Word],
        args: Sequence[Word] = (),
        *,
        orphan: Callable[[Reply], None] | None = None,
        unknown: Callable[[BaseException], None] | None = None,
        never: Callable[[], None] | None = None,
    ) -> Reply:
        """Run a script and return its reply, within the store's timeout.

        When the caller is cancelled or does not wait any longer, a request that is not yet sent never will be;
        the reply to one that is goes to `orphan`, which undoes what it granted. `unknown` is called when nobody can
        say whether it was carried out, since the connection broke; `never` when it was not, and will not be.

        Raises `StoreUnavailableError`, at once while the store is given up on and when it has been closed.
        """
        request = Request((len(keys), *keys, *args), script, orphan)
        request.unknown, request.never = unknown, never
        try:
            return await self._ask(request)
        finally:
            if not request.sent and never is not None:
                never()

    async def command(self, *words: Word, orphan: Callable[[Reply], None] | None = None) -> Reply:
        """Run one command, such as `"GET", key`, as `run` does a script."""
        return await self._ask(Request(words, None, orphan))

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
        """Run a script soon, without anybody waiting; `heard` is called with the reply, in the event loop.

        Its `words` may be changed as long as it is not `sent`. While the store is given up on it is kept, up to 10,000
        of them. Whatever may have been executed is sent again only with the arguments `again`, with which it does
        nothing the second time, and for `worth` seconds; what is given up is counted as lost. Call it from the event
        loop the store is used in.
        """
        request = Request((len(keys), *keys, *args), script, heard)
        if again is not None:
            request.again = (len(keys), *keys, *again)
            request.worth_until = self._bind().time() + worth
        self._tell(request)
        return request

    def send_command(self, *words: Word, heard: Callable[[Reply], None] | None = None) -> None:
        """Run one command soon, as `send` does a script."""
        self._tell(Request(words, None, heard))

    def while_used(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back before a batch when so many seconds have passed since the last time; never while idle."""
        self._regular.append(Regular(seconds, callback))

    def every(self, seconds: float, callback: Callable[[], bool]) -> None:
        """Call back in so many seconds and again after as many, until it gives `False` or the store is closed."""

        def tick() -> None:
            if self._closed or loop is not self._running:
                return
            again = True
            try:
                again = callback()
            except Exception:
                logger.exception(
                    "something that %s does regularly failed, and is done again", self.guard.name
                )
            if again:
                loop.call_later(seconds, tick)

        loop = self._bind()
        loop.call_later(seconds, tick)

    def end(self) -> None:
        """Let nothing more be asked; who waits for the store hears of it."""
        self._bind()
        self._closed = True
        self.guard.end()

    async def aclose(self) -> None:
        """Send what is to be told, for at most a second or ten timeouts, and close the client if it is ours."""
        if not self._closed:
            self.end()
        try:
            async with asyncio.timeout(_patience(self._timeout)):
                await self.sender.flush()
        except TimeoutError:
            logger.debug("%s did not hear in time of all that was to be settled", self.guard.name)
        finally:
            with anyio.CancelScope(shield=True):
                await self.sender.stop()
                await self._disconnect()

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.disconnect()
        if client is not None and self._owned:
            await client.aclose()

    def after_fork(self) -> None:
        """Hear, in the child, that what is under way is the parent's to send, over connections of its own."""
        for request in (*self.sender.asked, *self.sender.told):
            request.sent = True
        set_aside(self._client, self._transport, *self.sender.lanes)
        self.sender.told.clear()
        self._reset()
        self._parents, self._running = self._running or self._parents, None

    async def _ask(self, request: Request) -> Reply:
        loop = self._bind()
        if self._closed:
            raise self.guard.ended_error()
        request.admission = self.guard.admit()
        future = request.future = loop.create_future()
        request.expires = loop.time() + self._timeout
        self._waiting.append(request)  # all equally long: one timer, for who came first, serves them all
        if self._timer is None:
            self._timer = loop.call_at(request.expires, self._expire_due)
        self.sender.ask(request)
        try:
            return await future
        except asyncio.CancelledError:
            came = future.done() and not future.cancelled() and future.exception() is None
            if came and request.heard is not None:  # just before, and nobody will make use of it
                hand_over(request.heard, future.result())
            raise
        finally:
            if request.admission is not None:  # cancelled
                self.guard.dropped(request.admission)
                request.admission = None

    def _tell(self, request: Request) -> None:
        self._bind()
        self.sender.tell(request)

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = self._running
        try:
            running = asyncio.get_running_loop()
        except RuntimeError as error:
            raise EventLoopError(
                f"{self.guard.name} needs a running asyncio event loop, which redis-py is written for; "
                "on trio use MemoryStore, or a store of your own"
            ) from error
        if loop is not running:
            if running is self._parents or (self._parents is not None and self._client is not None):
                raise EventLoopError(
                    f"{self.guard.name} was carried over a fork with its event loop or with a client that was passed "
                    "in; make them after the fork"
                )
            self._loop.bind()
            self._running = loop = running
        return loop

    def _reset(self) -> None:
        """Start afresh in another event loop: what was on its way belongs to one that has ended."""
        told = self.sender.told
        self.sender = Sender(self.guard, self._reached, self._regular)
        self.sender.told = told
        self._waiting.clear()
        self._timer = None
        self._closed = False
        self.guard.begin()
        self._transport = None
        if self._owned:
            self._client = None

    def _reached(self) -> Transport:
        if self._transport is None:
            self._transport = self._reach(self.client, _patience(self._timeout))
        return self._transport

    def _expire_due(self) -> None:
        """Let those go whose time is up, and forget those who have their answers."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiting = self._waiting
        while waiting:
            request = waiting[0]
            if request.future is not None and not request.future.done():
                if request.expires > now:
                    self._timer = loop.call_at(request.expires, self._expire_due)
                    return
                self._expire(request)
            waiting.popleft()

    def _expire(self, request: Request) -> None:
        """Let a caller go whose time is up."""
        future = request.future
        if future is None or future.done():
            return
        why = f"no answer within {self._timeout:g} s"
        admission, request.admission = request.admission, None
        if admission is not None:
            self.guard.failed(admission, why)
        future.set_exception(self.guard.error(why))


def _reach(client: Any, patience: float) -> Transport:  # noqa: ANN401 - a redis.asyncio.Redis
    return Transport(client.connection_pool.make_connection, patience)


def _patience(timeout: float) -> float:
    """Say after how many seconds a connection is given up; a caller never waits so long."""
    return max(_PATIENCE, 10 * timeout)
