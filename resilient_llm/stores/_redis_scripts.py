"""Carry scripts and commands to a Redis or Valkey server: batched, bounded in time, never poisoning a connection.

Every part of a `RedisStore` (rate limits, leases, circuits, values) asks through here; what the scripts mean must not
enter. Requires the extra `redis`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import anyio
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.client import NEVER_DECODE
from redis.exceptions import (
    MaxConnectionsError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
)

from resilient_llm._loop import LoopBound
from resilient_llm.errors import EventLoopError, StoreUnavailableError
from resilient_llm.stores._fork import set_aside
from resilient_llm.stores._redis_commands import Client, Reply, Request, Script, Word
from resilient_llm.stores._redis_errors import describe, never_executed
from resilient_llm.stores._redis_line import Line
from resilient_llm.stores.guard import StoreGuard

__all__ = ["Client", "Reply", "Script", "ScriptRunner", "Word"]

logger = logging.getLogger("resilient_llm")

_LANES: Final = 2
"""Batches on their way at the same time: one is packed and parsed here while the server works on the other."""
_MOST: Final = 128
"""Requests in a batch: so many scripts keep the server busy for some milliseconds at most."""
_MOST_UNSENT: Final = 10_000
"""What is to be told and not yet sent, while the store is down; beyond that the oldest is given up."""
_NAP: Final = 0.001
"""Seconds until a client that has no free connection is asked for one again."""
_PATIENCE: Final = 1.0
"""Seconds (or 10 timeouts, if that is more) after which a connection is given up; a caller never waits so long."""


class ScriptRunner:
    """Ask a server, and tell it things, in batches.

    What is asked at the same time goes in one pipeline, whose connection belongs to a task of the runner's: a caller
    that is cancelled or runs out of time leaves nobody a reply that is not theirs, and few connections do. Such a
    task lives only while something is to be sent. A script that the server does not know is sent in full, once, and
    its neighbours are not run again. Nothing else is ever sent twice.

    `connect` makes the client, for each event loop that uses the store in turn; `timeout` is how many seconds a caller
    waits. Whether the store is asked at all, `guard` says. Works on asyncio only, as redis-py does.
    """

    def __init__(
        self, connect: Callable[[], Client], *, guard: StoreGuard, timeout: float, owned: bool = True
    ) -> None:
        self.guard = guard
        self._connect = connect
        self._timeout = timeout
        self._owned = owned
        self._client: Client | None = None
        self._line: Line | None = None
        self._asked: deque[Request] = deque()
        self._told: deque[Request] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._waiting: deque[Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._waking: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop = LoopBound(guard.name, self._reset)
        self._running: asyncio.AbstractEventLoop | None = None
        self._parents: asyncio.AbstractEventLoop | None = None
        self._crowded = 0
        self._regular: list[tuple[float, list[float], Callable[[], None]]] = []

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
            if self._owned and isinstance(self._client, Redis):
                self._line = Line(self._client)
        return self._client

    async def run(
        self,
        script: Script,
        keys: Sequence[Word],
        args: Sequence[Word] = (),
        *,
        orphan: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """Run a script and return its reply, within the store's timeout.

        When the caller is cancelled or does not wait any longer, a request that is not yet sent never will be;
        the reply to one that is goes to `orphan`, which undoes what it granted.

        Raises `StoreUnavailableError`, at once while the store is given up on and when it has been closed.
        """
        return await self._ask(Request((len(keys), *keys, *args), script, orphan))

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
    ) -> Request:
        """Run a script soon, without anybody waiting; `heard` is called with the reply, in the event loop.

        Its `words` may be changed as long as it is not `sent`. While the store is given up on it is kept, up to 10,000
        of them. Whatever may have been executed is not sent again; what is given up is counted as lost. Call it from
        the event loop the store is used in.
        """
        request = Request((len(keys), *keys, *args), script, heard)
        self._tell(request)
        return request

    def send_command(self, *words: Word, heard: Callable[[Reply], None] | None = None) -> None:
        """Run one command soon, as `send` does a script."""
        self._tell(Request(words, None, heard))

    def while_used(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back before a batch when so many seconds have passed since the last time; never while idle."""
        self._regular.append((seconds, [-math.inf], callback))

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

    async def aclose(self) -> None:
        """Send what is to be told, for at most a second or ten timeouts, and close the client if it is ours."""
        self._closed = True
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        try:
            async with asyncio.timeout(max(_PATIENCE, 10 * self._timeout)):
                self._pump()
                while self._sending:
                    await asyncio.wait(self._sending)
                    self._pump()
        except TimeoutError:
            for task in self._sending:
                task.cancel()
        self.guard.lost += len(self._told)
        for request in self._told:
            request.sent = True
        self._told.clear()
        client, self._client = self._client, None
        if self._line is not None:
            await self._line.disconnect()
            self._line = None
        if client is not None and self._owned:
            await client.aclose()

    def after_fork(self) -> None:
        """Hear, in the child, that what is under way is the parent's to send, over connections of its own."""
        for request in (*self._asked, *self._told):
            request.sent = True
        set_aside(self._client, self._line, *self._sending)
        self._told.clear()
        self._reset()
        self._parents, self._running = self._running or self._parents, None

    async def _ask(self, request: Request) -> Reply:
        loop = self._bind()
        if self._closed:
            raise self.guard.error("it has been closed")
        request.admission = self.guard.admit()
        future = request.future = loop.create_future()
        request.expires = loop.time() + self._timeout
        # All wait equally long: one timer, for who came first, serves all of them.
        self._waiting.append(request)
        if self._timer is None:
            self._timer = loop.call_at(request.expires, self._expire_due)
        self._asked.append(request)
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            if (
                future.done()
                and not future.cancelled()
                and future.exception() is None
                and request.heard is not None
            ):
                _call(request.heard, future.result())  # it came just before, and nobody will make use of it
            raise
        finally:
            if request.admission is not None:  # cancelled
                self.guard.dropped(request.admission)
                request.admission = None

    def _tell(self, request: Request) -> None:
        self._bind()
        if len(self._told) >= _MOST_UNSENT:
            self._told.popleft().sent = True
            self.guard.lost += 1
        self._told.append(request)
        self._pump()

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
        self._asked.clear()
        self._sending.clear()
        self._waiting.clear()
        self._waking = self._timer = None
        self._closed = False
        if self._owned:
            self._client = self._line = None

    def _pump(self) -> None:
        """See to it that somebody sends what there is to be sent."""
        if len(self._sending) >= _LANES:
            return
        if not self._asked:
            if not self._told:
                return
            if self._waking is not None:
                if not self.guard.closed:
                    return
                self._waking.cancel()  # somebody was quicker to find out that the store is back
                self._waking = None
            if not self.guard.closed and (wait := self.guard.retry_after()) > 0:
                if not self._closed and self._running is not None:
                    self._waking = self._running.call_later(wait, self._wake)
                return
        # An empty context: a task must not keep whoever happened to start it, nor be traced as theirs.
        task = asyncio.get_running_loop().create_task(self._send(), context=contextvars.Context())
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a batch for %s was not sent", self.guard.name, exc_info=error)
        if (self._asked or self._told) and self._running is not None and not self._running.is_closed():
            self._pump()

    def _wake(self) -> None:
        self._waking = None
        self._pump()

    async def _send(self) -> None:
        """Send one batch."""
        now = asyncio.get_running_loop().time()
        for seconds, last, callback in self._regular:
            if now - last[0] >= seconds and not self._closed:
                last[0] = now
                callback()
        batch = self._batch()
        if not batch:
            return
        admission = None
        if batch[0].future is None:  # nobody waits: if the store was down, this finds out
            try:
                admission = self.guard.admit()
            except StoreUnavailableError:
                for request in reversed(batch):
                    request.sent = False
                    self._told.appendleft(request)
                return
        failure = ""
        for request, reply in zip(batch, await self._exchange(batch), strict=True):
            failure = self._resolve(request, reply) or failure
        if admission is not None:
            if failure:
                self.guard.failed(admission, failure)
            else:
                self.guard.succeeded(admission)

    def _batch(self) -> list[Request]:
        batch: list[Request] = []
        while self._asked and len(batch) < _MOST:
            request = self._asked.popleft()
            if request.future is not None and not request.future.done():
                batch.append(request)
        if self.guard.closed or not batch:
            while self._told and len(batch) < _MOST:
                request = self._told.popleft()
                request.sent = True
                batch.append(request)
        return batch

    async def _exchange(self, batch: list[Request]) -> Sequence[Reply]:
        """Send requests and give their replies, of which some may be exceptions."""
        try:
            async with asyncio.timeout(max(_PATIENCE, 10 * self._timeout)):
                replies = await self._execute([request.command() for request in batch])
                unknown = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                if unknown:
                    again = await self._execute([batch[index].command(by_source=True) for index in unknown])
                    for index, reply in zip(unknown, again, strict=True):
                        replies[index] = reply
        except asyncio.CancelledError as error:  # closed, with no time left
            for request in batch:
                self._resolve(request, error)
            raise
        except Exception as error:  # noqa: BLE001 - whatever a client raises, the store has not answered
            replies = [error] * len(batch)
        if any(isinstance(reply, ReadOnlyError) for reply in replies):
            await self._leave_server()
        return replies

    async def _execute(self, commands: Sequence[Sequence[Word]]) -> list[Reply]:
        """Run commands once a connection is free: that there is none says nothing of the server."""
        while True:
            try:
                return await self._execute_now(commands)
            except MaxConnectionsError:
                await self._nap()

    async def _execute_now(self, commands: Sequence[Sequence[Word]]) -> list[Reply]:
        client = self.client
        if self._line is not None:
            return await self._line.exchange(commands)
        options = {NEVER_DECODE: True}
        if len(commands) == 1:
            try:
                return [await client.execute_command(*commands[0], **options)]
            except ResponseError as error:
                return [error]
        if isinstance(client, RedisCluster):
            # Its pipeline repeats all commands of a node when one of them is refused; these know no such thing.
            return list(
                await asyncio.gather(
                    *(self._execute_in_cluster(client, words) for words in commands), return_exceptions=True
                )
            )
        async with client.pipeline(transaction=False) as pipeline:
            for words in commands:
                pipeline.execute_command(*words, **options)
            return list(await pipeline.execute(raise_on_error=False))

    async def _execute_in_cluster(self, client: RedisCluster, words: Sequence[Word]) -> Reply:
        """Run one command of several, which all need connections at once, when one is free."""
        while True:
            try:
                return await client.execute_command(*words, **{NEVER_DECODE: True})
            except MaxConnectionsError:
                await self._nap()

    async def _nap(self) -> None:
        self._crowded += 1
        try:
            await anyio.sleep(_NAP)
        finally:
            self._crowded -= 1

    async def _leave_server(self) -> None:
        """Drop the connections to a server that is a primary no more: the name may lead to another one by now."""
        if self._line is not None:
            await self._line.disconnect()
        pool = getattr(self._client, "connection_pool", None)
        if pool is not None:
            await pool.disconnect(inuse_connections=False)

    def _resolve(self, request: Request, reply: Reply) -> str:
        """Hand a reply to whoever waits for it; give what failed, if it did."""
        failure = describe(reply) if isinstance(reply, BaseException) else ""
        future = request.future
        if future is None or future.done():
            if not failure:
                if request.heard is not None:
                    _call(request.heard, reply)
            elif future is None:
                self._unsent(request, reply)
            return failure
        admission, request.admission = request.admission, None
        if failure:
            if admission is not None:
                self.guard.failed(admission, failure)
            future.set_exception(self.guard.error(failure))
        else:
            if admission is not None:
                self.guard.succeeded(admission)
            future.set_result(reply)
        return failure

    def _unsent(self, request: Request, error: BaseException) -> None:
        """Keep what was certainly not executed for later; the rest is lost."""
        if never_executed(error) and len(self._told) < _MOST_UNSENT:
            request.sent = False
            self._told.append(request)
        else:
            self.guard.lost += 1

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
        if admission is None:
            pass
        elif self._crowded:  # not the server's fault
            why = f"no connection was free for {self._timeout:g} s"
            self.guard.dropped(admission)
        else:
            self.guard.failed(admission, why)
        future.set_exception(self.guard.error(why))


def _call(callback: Callable[[Reply], None], reply: Reply) -> None:
    try:
        callback(reply)
    except Exception:
        logger.exception("what a store replied could not be made use of")
