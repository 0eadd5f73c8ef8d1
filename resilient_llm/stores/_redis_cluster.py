"""A cluster of Redis or Valkey servers: each is asked by a runner of its own, found by the key that a request is about.

So what one server decides on goes to it in one batch, and one that fails or hangs holds up nobody else. Where the slots
are is the client's to know (`redis.asyncio.RedisCluster`); how a server is asked, `_redis_scripts`'.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from resilient_llm.stores._cluster_guard import ClusterGuard
from resilient_llm.stores._redis_commands import Client, Reply, Request, Script, Word
from resilient_llm.stores._redis_line import Connection, Line, before_sending
from resilient_llm.stores._redis_scripts import Regular, ScriptRunner
from resilient_llm.stores._redis_transport import Transport
from resilient_llm.stores.guard import StoreGuard

__all__ = ["ClusterRunner"]

_REDIRECTIONS: Final = 5
"""A request is sent on so often; a cluster that has agreed on where a slot is needs two."""
_NAP: Final = 0.004
"""Seconds until a request is sent again whose keys are just being moved."""
_LEARNED: Final = 0.1
"""Seconds for which what was learned of a cluster is not asked for again."""


class ClusterRunner:
    """Ask the servers of a cluster; see `ScriptRunner`, of which there is one for each."""

    def __init__(self, client: RedisCluster, *, guard: ClusterGuard, timeout: float) -> None:
        self.guard = guard
        self._slots = _Slots(client)
        self._timeout = timeout
        self._regular: list[Regular] = []
        self._runners: dict[str, ScriptRunner] = {}

    @property
    def used(self) -> bool:
        """Tell whether anything was asked, told or connected in this process."""
        return any(each.used for each in self._runners.values())

    @property
    def client(self) -> Client:
        """Give the client, which is the caller's, for what cannot go in a batch, such as pub/sub."""
        return self._at(()).client

    def guard_of(self, key: Word) -> StoreGuard:
        """Give the guard of the server that keeps a key."""
        return self._at((key,)).guard

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
        """Run a script on the server that keeps its keys; see `ScriptRunner.run`."""
        return await self._at(keys).run(script, keys, args, orphan=orphan, unknown=unknown, never=never)

    async def command(self, *words: Word, orphan: Callable[[Reply], None] | None = None) -> Reply:
        """Run one command on the server that keeps its first key."""
        return await self._at(words[1:]).command(*words, orphan=orphan)

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
        """Run a script soon; see `ScriptRunner.send`."""
        return self._at(keys).send(script, keys, args, heard=heard, again=again, worth=worth)

    def send_command(self, *words: Word, heard: Callable[[Reply], None] | None = None) -> None:
        """Run one command soon."""
        self._at(words[1:]).send_command(*words, heard=heard)

    def while_used(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back before a batch for any of the servers; see `ScriptRunner.while_used`."""
        self._regular.append(Regular(seconds, callback))

    def every(self, seconds: float, callback: Callable[[], bool]) -> None:
        """Call back in so many seconds and again after as many; see `ScriptRunner.every`."""
        self._at(()).every(seconds, callback)

    def end(self) -> None:
        """Let nothing more be asked; who waits for the store hears of it."""
        for each in self._runners.values():
            each.end()
        self.guard.end()

    async def aclose(self) -> None:
        """Send what is to be told, for at most a second or ten timeouts, and close the connections."""
        await asyncio.gather(*(each.aclose() for each in self._runners.values()))

    def after_fork(self) -> None:
        """Hear, in the child, that what is under way is the parent's to send."""
        for each in self._runners.values():
            each.after_fork()

    def _at(self, keys: Sequence[Word]) -> ScriptRunner:
        node = self._slots.node(keys)
        runner = self._runners.get(node.name)
        if runner is None:
            runner = self._runners[node.name] = ScriptRunner(
                lambda: self._slots.client,
                guard=self.guard.node(node.name),
                timeout=self._timeout,
                owned=False,
                transport=partial(self._reach, node),
                regular=self._regular,
            )
        return runner

    def _reach(self, node: ClusterNode, _client: Client, patience: float) -> Transport:
        return _NodeTransport(node, self._slots, patience)


class _Slots:
    """Know which server keeps what, as its client does."""

    def __init__(self, client: RedisCluster) -> None:
        self.client: Any = client
        self._learned = -_LEARNED
        self._lock = asyncio.Lock()

    def node(self, keys: Sequence[Word]) -> ClusterNode:
        """Give the server that keeps these keys; without any, or while it is not known, one that was named."""
        node: ClusterNode
        if keys:
            with suppress(SlotNotCoveredError):
                node = self.client.get_node_from_key(keys[0])
                return node
        node = next(iter(self.client.nodes_manager.startup_nodes.values()))
        return node

    @property
    def known(self) -> bool:
        """Tell whether it has been learned where slots are."""
        return bool(self.client.nodes_manager.slots_cache)

    async def learn(self, failed: str = "") -> None:
        """Ask the cluster where its slots are, any server but one that has `failed` first."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() - self._learned < _LEARNED and self.known:
                return
            if not self.known:
                await self.client.initialize()
            else:
                await self._learn_anew(failed)
            self._learned = loop.time()

    async def _learn_anew(self, failed: str) -> None:
        nodes = self.client.nodes_manager
        options = {}
        if "last_failed_node_name" in inspect.signature(nodes.initialize).parameters:
            options["last_failed_node_name"] = failed
        await nodes.initialize(**options)

    async def hear(self, moved: AskError) -> ClusterNode:
        """Hear where a slot is, or is about to be, and give that server."""
        if isinstance(moved, MovedError):
            await self.client.nodes_manager.move_slot(moved)
        node: ClusterNode | None = self.client.get_node(host=moved.host, port=moved.port)
        if node is None:
            await self.learn()
            node = self.client.get_node(host=moved.host, port=moved.port)
        if node is None:
            raise RedisError(f"a slot is being moved to {moved.node_addr}, which the cluster does not know")
        return node


class _NodeTransport(Transport):
    """Reach one server of a cluster, and the one that it says a slot has been moved to."""

    def __init__(self, node: ClusterNode, slots: _Slots, patience: float) -> None:
        super().__init__(partial(_connection, node), patience)
        self._node = node
        self._slots = slots
        self._others: dict[str, Line] = {}
        self._doubts = not slots.known
        """Whether it is to be asked first where slots are: this server has failed, or nobody knows."""

    async def disconnect(self) -> None:
        """Close what connections there are."""
        await super().disconnect()
        for each in self._others.values():
            await each.disconnect()

    async def _execute(self, commands: Sequence[Sequence[Word]]) -> list[Reply]:
        failed = True
        try:
            replies = await (self._execute_anew(commands) if self._doubts else self.line.exchange(commands))
            sent_on = [index for index, reply in enumerate(replies) if isinstance(reply, _ELSEWHERE)]
            if sent_on:
                again = [self._send_on(commands[index], replies[index]) for index in sent_on]
                for index, reply in zip(sent_on, await asyncio.gather(*again), strict=True):
                    replies[index] = reply
            failed = any(_is_failure(reply) for reply in replies)
        finally:
            self._doubts = failed
        return replies

    async def _execute_anew(self, commands: Sequence[Sequence[Word]]) -> list[Reply]:
        """Find out where slots are by now, and send each command there."""
        async with before_sending(self._to_connect):
            await self._slots.learn(self._node.name)
        lines = [self._line(self._slots.node(_keys(words))) for words in commands]
        replies: list[Reply] = [None] * len(commands)

        async def send(line: Line) -> None:
            mine = [index for index, each in enumerate(lines) if each is line]
            try:
                got = await line.exchange([commands[index] for index in mine])
            except (RedisError, OSError) as error:
                got = [error] * len(mine)
            for index, reply in zip(mine, got, strict=True):
                replies[index] = reply

        await asyncio.gather(*(send(line) for line in dict.fromkeys(lines)))
        return replies

    async def _send_on(self, words: Sequence[Word], reply: ResponseError) -> Reply:
        """Send a command to where it belongs, for it has not been carried out."""
        line, asks = self.line, False
        for _ in range(_REDIRECTIONS):
            try:
                if isinstance(reply, AskError):
                    line = self._line(await self._slots.hear(reply))
                    asks = not isinstance(reply, MovedError)
                else:
                    await anyio.sleep(_NAP)
                *_, reply = await line.exchange([("ASKING",), words] if asks else [words])
            except (RedisError, OSError) as error:
                return error
            if not isinstance(reply, _ELSEWHERE):
                break
        return reply

    def _line(self, node: ClusterNode) -> Line:
        if node.name == self._node.name:
            return self.line
        if node.name not in self._others:
            self._others[node.name] = self._line_of(partial(_connection, node))
        return self._others[node.name]


_ELSEWHERE: Final = (AskError, TryAgainError)  # MovedError is an AskError


def _is_failure(reply: Reply) -> bool:
    """Tell whether the slots may not be where they were."""
    if isinstance(reply, ResponseError):
        return isinstance(reply, AskError | ClusterDownError | ReadOnlyError)
    return isinstance(reply, RedisError | OSError)


def _keys(words: Sequence[Word]) -> Sequence[Word]:
    """Give the first key of a command, if it has one."""
    if words[0] in ("EVALSHA", "EVAL"):
        return words[3:4] if words[2] else ()
    return words[1:2]


def _connection(node: ClusterNode) -> Connection:
    return node.connection_class(**node.connection_kwargs)
