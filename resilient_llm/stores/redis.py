"""The store on a Redis or Valkey server: one connection and script core, a part for each thing that is shared.

Requires the extra `redis`. What a part decides is in its own file and its scripts in `lua/`; nothing of that enters
here.
"""

from __future__ import annotations

import inspect
import re
import secrets
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

try:
    from redis.asyncio import Redis, RedisCluster
except ImportError as error:
    raise ImportError("RedisStore needs redis-py: pip install 'resilient-llm[redis]'") from error

from resilient_llm.errors import ConfigurationError
from resilient_llm.stores._cluster_guard import ClusterGuard
from resilient_llm.stores._fork import tell_of_forks
from resilient_llm.stores._redis_circuits import RedisCircuits
from resilient_llm.stores._redis_cluster import ClusterRunner
from resilient_llm.stores._redis_commands import Client
from resilient_llm.stores._redis_leases import RedisLeases
from resilient_llm.stores._redis_ledger import RedisLedger
from resilient_llm.stores._redis_presence import Presence
from resilient_llm.stores._redis_rates import RedisRates
from resilient_llm.stores._redis_replies import RedisReplies
from resilient_llm.stores._redis_runner import Runner
from resilient_llm.stores._redis_scripts import ScriptRunner
from resilient_llm.stores.guard import OnStoreError, StoreGuard

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["RedisStore"]

_CONNECT = 1.0
_MAX_CONNECTIONS = 8


class RedisStore:
    """Keep what policies share on a Redis or Valkey server, or in a cluster of them.

    `server` is a URL (`redis://`, `rediss://` for TLS, `unix://`) or a client that is ready: a `redis.asyncio.Redis`,
    also one that a `Sentinel` made, or a `RedisCluster`. A client that is passed in is the caller's to close, and
    belongs to one event loop; the store makes connections of its own by what it says.

    All keys begin with `prefix`. A call waits for the server at most `timeout` seconds. What it meets when there is
    no answer, or while the store is given up on, `on_store_error` says: this process's share of the limits ("local",
    by the number of processes that were alive), no limit ("open"), or a `StoreUnavailableError` ("closed").

    A slot of a bulkhead that is not given back, since its process was killed, is free again after `lease` seconds.

    `clock="client"` is for managed services that refuse `TIME` in scripts: the time is this machine's then.

    Works on asyncio. Close it with `aclose`, or use it in `async with`: what is still to be settled is sent then.
    Raises `ConfigurationError` for options that cannot work.
    """

    def __init__(
        self,
        server: str | Client,
        *,
        prefix: str = "resilient_llm:",
        timeout: float = 0.05,
        on_store_error: OnStoreError = "local",
        clock: Literal["server", "client"] = "server",
        lease: float = 15.0,
        name: str = "redis",
    ) -> None:
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < 60:
            raise ConfigurationError(f"timeout={timeout!r}: allowed are seconds above 0 and below 60")
        if not isinstance(prefix, str) or "{" in prefix or "}" in prefix:
            raise ConfigurationError(f"prefix={prefix!r}: allowed are strings without braces")
        if clock not in ("server", "client"):
            raise ConfigurationError(f"clock={clock!r}: allowed are 'server' and 'client'")
        self.prefix = prefix
        self.guard: StoreGuard
        self.runner: Runner
        """Carries commands and scripts, for parts of the store."""
        if isinstance(server, RedisCluster):
            self.guard = guard = ClusterGuard(name, on_store_error)
            self.runner = ClusterRunner(server, guard=guard, timeout=timeout)
        else:
            connect = _connector(server, timeout)
            self.guard = StoreGuard(name, on_store_error)
            self.runner = ScriptRunner(
                connect, guard=self.guard, timeout=timeout, owned=isinstance(server, str)
            )
        self.id = secrets.token_hex(8)
        """Names this process among those that share the store."""
        self._presence = Presence(self.runner, f"{prefix}processes", self.id)
        # Wall-clock time, in place of the server's; nothing here is measured by it.
        self._clock = time.time if clock == "client" else None  # noqa: TID251
        self._leases = RedisLeases(self.runner, prefix, self.id, lasts=lease, clock=self._clock)
        tell_of_forks(self)

    @property
    def processes(self) -> int:
        """Give the number of processes that were alive when the store was last heard of, this one among them."""
        return self._presence.processes

    @cached_property
    def rates(self) -> RedisRates:
        """Give the rate limits."""
        self._presence.start()
        return RedisRates(self.runner, self.prefix, clock=self._clock)

    @property
    def leases(self) -> RedisLeases:
        """Give the leases."""
        self._presence.start()
        return self._leases

    @cached_property
    def circuits(self) -> RedisCircuits:
        """Give the circuits."""
        self._presence.start()
        return RedisCircuits(self.runner, self.prefix, clock=self._clock)

    @cached_property
    def replies(self) -> RedisReplies:
        """Give the replies that are kept, for `Cache` and `Idempotency`."""
        return RedisReplies(self.runner, self.prefix)

    @cached_property
    def ledger(self) -> RedisLedger:
        """Give the budgets, for `Budget`."""
        self._presence.start()
        return RedisLedger(self.runner, self.prefix, processes=lambda: self.processes, clock=self._clock)

    def after_fork(self) -> None:
        """Go on, in the child of a fork, as another process; called by itself."""
        self.id = secrets.token_hex(8)
        self.runner.after_fork()
        self._presence.after_fork(self.id)
        self._leases.after_fork(self.id)
        if "ledger" in self.__dict__:
            self.ledger.after_fork()

    async def aclose(self) -> None:
        """Send what is still to be settled, for at most a second or ten timeouts, and close the connections.

        Who waits for the store meets what `on_store_error` says, at once, and so does who comes later. A slot that is
        given back later comes back when its lease ends.
        """
        if not self.runner.used:
            return
        self.runner.end()
        self._leases.end()
        self._presence.leave()
        try:
            await self._leases.aclose()
        finally:
            await self.runner.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _connector(server: str | Client, timeout: float) -> Callable[[], Redis]:
    """Make what makes clients, for each event loop in turn, or gives the one there is."""
    if isinstance(server, Redis):
        return lambda: server
    if not isinstance(server, str):
        what = (
            f"the class {server.__name__}" if isinstance(server, type) else f"a {type(server).__qualname__}"
        )
        raise ConfigurationError(f"server is {what}: allowed are a URL and a client of redis.asyncio")
    connect = partial(_connect, server, timeout)
    try:
        connect().connection_pool.make_connection()  # type: ignore[no-untyped-call]
        _check_database(server)
    except (ValueError, TypeError) as error:
        # What is wrong may be a password with characters that mean something in a URL: it is not shown.
        why = "its port is not a number from 0 to 65535" if "Port " in str(error) else str(error)
        scheme = server.partition("://")[0] if "://" in server else ""
        raise ConfigurationError(
            f"server={scheme + '://...'!r}: allowed are a URL and a client of redis.asyncio; {why}"
        ) from None
    return connect


def _check_database(url: str) -> None:
    """Refuse a path that is no number: redis-py takes it for database 0."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and not re.fullmatch("/?[0-9]*/?", parts.path):
        raise ValueError("its path is not the number of a database")


def _connect(url: str, timeout: float) -> Redis:
    """Make a client whose connections connect at their leisure."""
    client: Redis = Redis.from_url(
        url,
        socket_connect_timeout=max(_CONNECT, 10 * timeout),
        socket_timeout=None,
        max_connections=_MAX_CONNECTIONS,
        **_without_notifications(),
    )
    return client


def _without_notifications() -> dict[str, Any]:
    """Turn maintenance notifications off, where a version of redis-py has them: nobody here makes use of them."""
    if "maint_notifications_config" not in inspect.signature(Redis).parameters:
        return {}
    from redis.maint_notifications import MaintNotificationsConfig  # noqa: PLC0415 - not in older ones

    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
