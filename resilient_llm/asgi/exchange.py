"""One request at the ASGI door: its messages both ways, and a client that may leave at any moment.

The app runs in the server's own task, beside a single one that listens to the client. Who may run and what a
refusal looks like are decided elsewhere.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from resilient_llm.asgi.inbox import Inbox
from resilient_llm.asgi.listening import while_listening
from resilient_llm.context import Ambient, current, enclosing
from resilient_llm.message import Reply, header
from resilient_llm.outcome import CANCELLED, Outcome, Verdict
from resilient_llm.streams import BufferedStream

if TYPE_CHECKING:
    from resilient_llm.asgi.rate_limit_headers import HeadersOf
    from resilient_llm.call import Call
    from resilient_llm.message import Headers
    from resilient_llm.pipeline import Pipeline

__all__ = ["Exchange"]

_BODY = frozenset({"http.response.body", "http.response.pathsend", "http.response.zerocopysend"})
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
_MAX_HALF = 65_536  # bytes of an event that are kept back until it is whole
_LAST_WORD = 1.0  # seconds in which a client must take the event that ends its stream


class Exchange:
    """Carry one request to the app and its response back, for as long as the client stays.

    A client that leaves before the app runs, or (with `cancel`) before the app has begun to answer, ends the
    call by cancellation. Later the app hears of it as from a server: `receive` gives a disconnect, and `send`
    raises `OSError` where the server's specification has it so (2.4).
    """

    def __init__(
        self,
        call: Call,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        cancel: bool,
        max_buffered_body: int,
    ) -> None:
        self.scope = scope
        self.status: int | None = None
        """The status of the response, once it has begun."""
        self.extra_headers: HeadersOf | None = None
        """Gives what a response has besides its own headers, once it is known whose request it answers."""
        self.complete = False
        """Whether the last of the body is on its way."""
        self.disconnected = False
        """Whether the client left before that."""
        self._call = call
        self._inbox = Inbox(receive, max_buffered_body)
        self._send = send
        self._cancel = cancel
        self._running = False
        self._headers: Headers = []
        self._half: bytes | None = (
            None  # of an event that is not whole yet; None for a body that gets no event
        )
        self._half_sent = False

    async def carry(self, pipeline: Pipeline) -> None:
        """Take the call through the pipeline until it is answered or the client leaves, and finish it.

        Raises what the pipeline or the app raises, as it is and not in a group.
        """
        call = self._call
        try:
            await while_listening(partial(self._go_through, pipeline), self._listen)
        except BaseException as error:
            await call.fail(error)
            raise
        await call.end(self._outcome())

    async def run(self, app: ASGIApp) -> Reply:
        """Run the app in this very task, as the end of the pipeline."""
        if self._running:
            msg = "a policy called call_next twice, but a request that is being answered cannot be replayed"
            raise RuntimeError(msg)
        self._running = True
        call = self._call
        call.mark_sent()
        here = Ambient(tenant=call.tenant, priority=call.priority, deadline=call.deadline, owner=call)
        token = current.set(here)
        call.enclosing = enclosing.get()
        inside = enclosing.set(call)
        try:
            await app(self.scope, self._inbox.receive, self.send)
        except (Exception, BaseExceptionGroup) as error:
            crashed = Outcome(verdict=Verdict.FAILURE, error_type=type(error).__name__, status=self.status)
            call.finish(CANCELLED if self.disconnected else crashed)
            raise
        finally:
            enclosing.reset(inside)
            current.reset(token)
        call.finish(self._outcome())
        return Reply(self.status or 500, self._headers, BufferedStream([]), complete=True)

    async def send(self, message: Message) -> None:
        """Pass a message on to the client; with the last of the body the call is finished."""
        kind = message["type"]
        if kind == "http.response.start":
            self._start(message)
            if self.extra_headers is not None:
                told = self.extra_headers(self._call, self._headers)
                message = {**message, "headers": [*self._headers, *told]}
        last = kind in _BODY and not message.get("more_body", False)
        if self._half is not None and kind == "http.response.body":
            message = self._whole_events(message, self._half, last=last)
        ends = last and not self.complete
        if ends:
            # From here on a disconnect only says that the response is over; it may come before `send` returns.
            self.complete = True
        try:
            await self._send(message)
        except OSError:
            if ends:  # the client has left before it
                self.complete = False
            self._leave()
            raise
        if last:
            await self._end()
        elif kind in _BODY and self.disconnected and self._send_raises():
            raise OSError("the client has disconnected")

    async def end_stream(self, event: bytes) -> bool:
        """End a response with one more event, in place of one that is not whole; tell whether that could be done.

        It cannot when the body is anything but a plain event stream, or when the client does not take it.
        """
        if self._half is None or self.complete:
            return False
        self._half = None
        cut_short = self._half_sent
        with anyio.move_on_after(_LAST_WORD) as scope:
            await self.send({"type": "http.response.body", "body": b"\n\n" + event if cut_short else event})
        return not scope.cancelled_caught

    async def _go_through(self, pipeline: Pipeline) -> None:
        reply = await pipeline.handle(self._call)
        if not self._running:
            await self._relay(reply)

    async def _listen(self, call_scope: anyio.CancelScope) -> None:
        if call_scope.cancel_called:
            return  # refused before this task began: nothing of the body need be asked for
        if not await self._inbox.pump():
            return
        self._leave()
        unanswered = self.status is None
        if self.disconnected and (not self._running or (self._cancel and unanswered)):
            call_scope.cancel()

    def _leave(self) -> None:
        if not self.complete:
            self.disconnected = True
            self._inbox.close()

    def _start(self, message: Message) -> None:
        self.status = message["status"]
        self._headers = list(message.get("headers", ()))
        content_type = header(self._headers, b"content-type") or b""
        if content_type.lower().startswith(b"text/event-stream") and not (
            header(self._headers, b"content-encoding") or header(self._headers, b"content-length")
        ):
            # Only where a deadline may come between two parts of an event: all else passes as it comes.
            self._half = b"" if self._call.deadline < math.inf else None

    def _whole_events(self, message: Message, half: bytes, *, last: bool) -> Message:
        """Keep an event back until it is whole: nothing could take the half of it back that was sent."""
        body = half + message.get("body", b"")
        end = max(body.rfind(line) + len(line) if line in body else 0 for line in _BLANK_LINES)
        if last or len(body) - end > _MAX_HALF:
            end = len(body)
        self._half = body[end:]
        self._half_sent = (self._half_sent or end > 0) and not body[:end].endswith(_BLANK_LINES)
        return message if not half and end == len(body) else {**message, "body": body[:end]}

    async def _end(self) -> None:
        call = self._call
        call.finish(self._outcome())
        self._inbox.discard()
        if call.unsettled:
            await call.settle()

    async def _relay(self, reply: Reply) -> None:
        """Send what a policy answered in the app's stead."""
        try:
            await self.send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
            async for chunk in reply.stream:
                await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
            await self.send({"type": "http.response.body", "body": b""})
        finally:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _LAST_WORD):
                await reply.stream.aclose()

    def _outcome(self) -> Outcome:
        if self.disconnected:
            return CANCELLED
        status = self.status
        if status is None:
            return Outcome(verdict=Verdict.FAILURE, error_type="no_response")
        if status >= 500:
            return Outcome(verdict=Verdict.FAILURE, error_type=str(status), status=status)
        if status == 429:
            return Outcome(verdict=Verdict.NEUTRAL, error_type=str(status), status=status)
        return Outcome(verdict=Verdict.SUCCESS, status=status)

    def _send_raises(self) -> bool:
        version: str = self.scope.get("asgi", {}).get("spec_version", "2.0")
        return tuple(map(int, version.split("."))) >= (2, 4)
