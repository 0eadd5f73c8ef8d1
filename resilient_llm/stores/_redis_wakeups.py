"""What processes that share leases say to one another: that a lease is free, by publishing it to whose it is.

What follows from it must not enter here; nothing relies on its being heard.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Any, Final

import anyio
from redis.exceptions import RedisError

from resilient_llm.stores._fork import set_aside
from resilient_llm.stores._redis_runner import Runner

if TYPE_CHECKING:
    from redis.asyncio.client import PubSub

__all__ = ["Wakeups"]

logger = logging.getLogger("resilient_llm")

_FEWEST_CONNECTIONS: Final = 3
"""A pool of fewer has none to spare for a subscription."""
_LONGEST_DELAY: Final = 10.0
"""Seconds after which a subscription that cannot be had is tried again."""


class Wakeups:
    """Subscribe to a channel, on a connection of the client's, and pass on what is said there with `wake`.

    `wake_all` is called when something may have been said to nobody. A subscription that is lost is tried again after
    `delay` seconds, and less and less often.
    """

    def __init__(
        self,
        runner: Runner,
        wake: Callable[[Iterable[bytes | str]], None],
        wake_all: Callable[[], None],
        *,
        delay: float,
    ) -> None:
        self.heard = False
        """Whether others can say something to this process."""
        self._runner = runner
        self._wake = wake
        self._wake_all = wake_all
        self._delay = delay
        self._listener: asyncio.Task[None] | None = None

    def start(self, channel: str) -> None:
        """Subscribe, unless that is done."""
        if self._listener is not None:
            return
        pool = getattr(self._runner.client, "connection_pool", None)
        if getattr(pool, "max_connections", inf) < _FEWEST_CONNECTIONS:
            return
        # An empty context: a task must not keep whoever happened to start it, nor be traced as theirs.
        self._listener = asyncio.get_running_loop().create_task(
            self._listen(channel), context=contextvars.Context()
        )

    async def stop(self) -> None:
        """Hear nothing more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            await asyncio.wait([listener])

    def forget(self) -> None:
        """Start afresh: a listener of a loop that has ended is gone with it."""
        self._listener = None
        self.heard = False

    def after_fork(self) -> None:
        """Leave the subscription to the parent."""
        set_aside(self._listener)
        self.forget()

    async def _listen(self, channel: str) -> None:
        """Pass on what other processes say; without a connection for it, polling has to do."""
        delay = self._delay
        while self._is_mine():
            pubsub: PubSub | Any = None
            try:
                pubsub = self._runner.client.pubsub()
                await pubsub.subscribe(channel)
                self.heard = True
                delay = self._delay
                self._wake_all()
                while self._is_mine():
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=None)
                    if message is not None:
                        self._wake([message["data"]])
            except (RedisError, OSError, AttributeError) as error:
                logger.debug("no news of free leases, asking for them instead: %s", error)
            finally:
                self.heard = False
                if pubsub is not None:
                    with anyio.CancelScope(shield=True):
                        await _close(pubsub)
            if self._is_mine():
                self._wake_all()  # something may have been said to nobody
                await anyio.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)

    def _is_mine(self) -> bool:
        """Tell whether this is still the task that listens: a client may make an error of its own of a cancellation."""
        return asyncio.current_task() is self._listener


async def _close(pubsub: PubSub) -> None:
    try:
        await pubsub.aclose()  # type: ignore[no-untyped-call]
    except (RedisError, OSError):
        logger.debug("a subscription did not close")
