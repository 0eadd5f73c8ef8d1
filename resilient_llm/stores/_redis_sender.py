"""What a store sends to one server: requests of those who wait and of those who do not, in batches, and their replies.

Who asks, and how long anyone waits, is `_redis_scripts`'; how a batch gets there, `_redis_transport`'.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from resilient_llm.core.circuit import Admission
from resilient_llm.errors import StoreUnavailableError
from resilient_llm.stores._redis_commands import Reply, Request
from resilient_llm.stores._redis_errors import (
    describe,
    is_proof,
    is_unknown,
    never_executed,
    refuses_writes,
)
from resilient_llm.stores._redis_transport import Transport
from resilient_llm.stores.guard import StoreGuard

__all__ = ["Regular", "Sender", "hand_over"]

logger = logging.getLogger("resilient_llm")

_LANES: Final = 2
"""Batches on their way at the same time: one is packed and parsed here while the server works on the other."""
_MOST: Final = 128
"""Requests in a batch: so many scripts keep the server busy for some milliseconds at most."""
_MOST_UNSENT: Final = 10_000
"""What is to be told and not yet sent, while the store is down; beyond that the oldest is given up."""


@dataclass(slots=True)
class Regular:
    """Something that is done before a batch, at most every so many seconds."""

    seconds: float
    callback: Callable[[], None]
    last: float = -math.inf


class Sender:
    """Send batches in at most two lanes, each a task that lives while there is something to send.

    What is asked goes first. What is told is kept while the server is given up on, by `guard`, and goes once it is
    back; what may have been carried out is sent again only where a second time does nothing.
    """

    def __init__(self, guard: StoreGuard, reach: Callable[[], Transport], regular: Sequence[Regular]) -> None:
        self.asked: deque[Request] = deque()
        self.told: deque[Request] = deque()
        self.lanes: set[asyncio.Task[None]] = set()
        self.closing = False
        """Whether nobody is left to send what cannot be sent now."""
        self._guard = guard
        self._reach = reach
        self._regular = regular
        self._lingering = False
        """Whether a lane is about to look for more to send."""
        self._waking: asyncio.TimerHandle | None = None
        self._stopped = False
        self._knocks = False
        """Whether a server that is given up on is asked all the same: it is the last occasion."""
        self._refuses = False
        """Whether the server refuses to write: that it answers to anything else does not make it well."""

    def ask(self, request: Request) -> None:
        """Send a request for somebody who waits."""
        self.asked.append(request)
        self._pump()

    def tell(self, request: Request) -> None:
        """Send a request for nobody in particular, soon; what is too much is lost, the oldest first."""
        if self._stopped:
            self._lose(request)
            return
        if len(self.told) >= _MOST_UNSENT:
            self._lose(self.told.popleft())
        self.told.append(request)
        self._pump()

    async def flush(self) -> None:
        """Send all there is; if the server is given up on, find out whether it is back."""
        self.closing = self._knocks = True
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._pump()
        while self.lanes:
            await asyncio.wait(self.lanes)
            self._pump()

    async def stop(self) -> None:
        """Send nothing more, and give up what is under way or still to be told."""
        self._stopped = True
        for lane in self.lanes:
            lane.cancel()
        if self.lanes:
            await asyncio.wait(self.lanes)
        while self.told:
            self._lose(self.told.popleft())

    def _pump(self) -> None:
        """See to it that somebody sends what there is to be sent."""
        if self._lingering or len(self.lanes) >= _LANES or not self._has_more():
            return
        # An empty context: a task must not keep whoever happened to start it, nor be traced as theirs.
        lane = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())
        self.lanes.add(lane)

    def _has_more(self) -> bool:
        """Tell whether there is something to send now; while the server is given up on, see to it later."""
        if self._stopped:
            return False
        if self.asked:
            return True
        if not self.told:
            return False
        if self._waking is not None:
            if not self._guard.well:
                return False
            self._waking.cancel()  # somebody was quicker to find out that the store is back
            self._waking = None
        if not self._guard.well and (wait := self._guard.retry_after()) > 0:
            if not self.closing:
                self._waking = asyncio.get_running_loop().call_later(wait, self._wake)
            return self._knocks
        return True

    def _wake(self) -> None:
        self._waking = None
        self._pump()

    async def _run(self) -> None:
        """Send one batch after another while there is something to send."""
        try:
            while self._has_more():
                try:
                    await self._send()
                except Exception:
                    logger.exception("a batch for %s was not sent", self._guard.name)
                self._lingering = True
                try:
                    await (
                        _Turn()
                    )  # those who have their answers may ask for more: it takes no other task then
                finally:
                    self._lingering = False
        finally:
            self.lanes.discard(asyncio.current_task())

    async def _send(self) -> None:
        """Send one batch."""
        self._do_what_is_due()
        batch = self._batch()
        if not batch:
            return
        if self.asked:
            self._pump()
        admission = None
        if batch[0].future is None:  # nobody waits: if the store was down, this finds out
            try:
                admission = self._guard.admit()
            except StoreUnavailableError:
                if not self._knocks:
                    for request in reversed(batch):
                        request.sent = False
                        self.told.appendleft(request)
                    return
        try:
            replies = await self._reach().exchange(batch)
        except (
            asyncio.CancelledError
        ) as error:  # closed, or its event loop ends: that says nothing of the server
            if admission is not None:
                self._guard.dropped(admission)
            self._hand_out(batch, [error] * len(batch), None)
            raise
        self._knocks = self._knocks and not any(isinstance(reply, BaseException) for reply in replies)
        self._hand_out(batch, replies, admission)

    def _do_what_is_due(self) -> None:
        now = asyncio.get_running_loop().time()
        for each in self._regular:
            if now - each.last >= each.seconds and not self.closing:
                each.last = now
                each.callback()

    def _batch(self) -> list[Request]:
        batch: list[Request] = []
        while self.asked and len(batch) < _MOST:
            request = self.asked.popleft()
            if request.future is not None and not request.future.done():
                request.sent = True
                batch.append(request)
        if self._guard.well or not batch:
            while self.told and len(batch) < _MOST:
                request = self.told.popleft()
                request.sent = True
                batch.append(request)
        return batch

    def _hand_out(
        self, batch: Sequence[Request], replies: Sequence[Reply], admission: Admission | None
    ) -> None:
        failure, proof = "", False
        for request, reply in zip(batch, replies, strict=True):
            failure = self.resolve(request, reply) or failure
            proof = proof or is_proof(request)
        if admission is not None:
            self._judge(admission, failure, proof=proof)

    def resolve(self, request: Request, reply: Reply) -> str:
        """Hand a reply to whoever waits for it; give what failed, if it did."""
        failure = ""
        if isinstance(reply, BaseException):
            failure = describe(reply)
            self._refuses = self._refuses or refuses_writes(reply)
        future = request.future
        if failure and future is not None:
            self._tell_fate(request, reply)
        if future is None or future.done():
            if not failure:
                if request.heard is not None:
                    hand_over(request.heard, reply)
            elif future is None:
                self._keep(request, reply)
            return failure
        admission, request.admission = request.admission, None
        if admission is not None and isinstance(reply, asyncio.CancelledError):
            self._guard.dropped(admission)
        elif admission is not None:
            self._judge(admission, failure, proof=is_proof(request))
        if failure:
            future.set_exception(self._guard.error(failure))
        else:
            future.set_result(reply)
        return failure

    def _tell_fate(self, request: Request, error: BaseException) -> None:
        """Say of a request that failed whether it was carried out, where that is known and somebody cares."""
        unknown, never = request.unknown, request.never
        if unknown is not None and is_unknown(error):
            hand_over(unknown, error)
        if never is not None and never_executed(error):
            hand_over(lambda _: never(), error)

    def _judge(self, admission: Admission, failure: str, *, proof: bool) -> None:
        """Let the guard hear what a reply says of the server."""
        if failure:
            self._guard.failed(admission, failure)
        elif self._refuses and not proof:
            self._guard.dropped(admission)
        else:
            self._refuses = False
            self._guard.succeeded(admission)

    def _keep(self, request: Request, error: BaseException) -> None:
        """Keep for later what was certainly not executed, or does no harm twice; the rest is lost."""
        if self._stopped or len(self.told) >= _MOST_UNSENT:
            self._lose(request)
        elif never_executed(error):
            request.sent = False
            self.told.append(request)
        elif request.again is not None and is_unknown(error) and self._is_worth_it(request):
            request.words = request.again
            self.told.append(request)
        else:
            self._lose(request)

    def _is_worth_it(self, request: Request) -> bool:
        return asyncio.get_running_loop().time() < request.worth_until

    def _lose(self, request: Request) -> None:
        request.sent = True
        self._guard.lose()


class _Turn:
    """Let the event loop go round once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def hand_over(callback: Callable[[Reply], None], reply: Reply) -> None:
    """Call back with a reply; what goes wrong is logged, since there is nobody to tell."""
    try:
        callback(reply)
    except Exception:
        logger.exception("what a store replied could not be made use of")
