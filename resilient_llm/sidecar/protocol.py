"""uvicorn's protocol, strict about what a request is, and with bounds on what a client may keep: memory, time, sockets.

uvicorn has none of them, and httptools, its parser, keeps what it is sent and lets pass what others may read in another
way. Upgrades are ignored (RFC 9110, 7.8). The body of a request is the app's.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, ClassVar, cast
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl

from resilient_llm.sidecar.acknowledged import acknowledged
from resilient_llm.sidecar.close_delimited import close_delimited
from resilient_llm.sidecar.counted import CountedProtocol
from resilient_llm.sidecar.cycle import Cycle
from resilient_llm.sidecar.disconnect import EMPTY_QUERY, EXTENSION
from resilient_llm.sidecar.half_close import say_no_more
from resilient_llm.sidecar.head import HeadTooLargeError, MalformedHeadError, check_head, without_upgrade
from resilient_llm.sidecar.rejection import LATE, MALFORMED, TOO_LARGE, TOO_MANY, Rejection, what_is_wrong
from resilient_llm.sidecar.secure_transport import SecureTransport
from resilient_llm.transports.batched import Batch, BatchedTransport

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, HTTPScope

__all__ = ["LAST_STAGE", "GuardedProtocol", "guarded"]

LAST_STAGE = 5.0
"""Seconds in which a client may read the last that it is told, and close the connection itself."""

_END = b"\r\n\r\n"
"""Of each head."""

_STEP = 1024
"""Bytes that are looked at together at least. There are a few small requests in them, and all of what most ask."""


class _Flow(FlowControl):
    """Do not read on for any request while what waits behind it is enough."""

    is_full = False

    def resume_reading(self) -> None:
        """Read on, unless that would be read too soon."""
        if not self.is_full:
            super().resume_reading()


class GuardedProtocol(CountedProtocol):
    """Refuse heads of more than `max_head` bytes (431), or that are not there `head_timeout` seconds after they began.

    A connection that sends nothing at all has as long. What surrounds the parts of a chunked body, trailers among it,
    has the bound of a head. What comes behind a request that is whole is looked at when that has its answer, but for a
    little that came with it; what has a fault is refused in its turn. A client that has taken nothing of what waits for
    it for `send_timeout` seconds is left, and one that finds no room is refused (503).
    """

    max_head: ClassVar[int] = 64 * 1024
    head_timeout: ClassVar[float] = 10.0
    send_timeout: ClassVar[float] = 60.0

    _batch: ClassVar[Batch | None] = None
    """Of all connections of a server."""
    _size = 0
    """Bytes that came since there was last a whole head, or some of a body."""
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _acknowledged = 0
    """What the client had taken when that was last looked at."""
    flow: _Flow
    transport: BatchedTransport
    _rest = b""
    """What came behind a request that has still to be answered."""
    _last_word: bytes | None = None
    """What is said when all that is in line has its answer."""
    _leaving: asyncio.TimerHandle | None = None
    _context: Context
    """What each request begins in: some are begun where another ends, and would go on with its trace."""
    _idle: asyncio.TimerHandle | None = None
    """Looks whether nothing was asked for long, and then again: one for each request would cost each of them."""
    _idle_since: float | None = None
    """When the last answer ended, whatever has come since of a body that it did not wait for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        batch = type(self)._batch
        if batch is None or batch.loop is not self.loop:
            batch = type(self)._batch = Batch(self.loop)
        secure = None if transport.get_extra_info("sslcontext") is None else SecureTransport(transport, batch)
        super().connection_made(secure or BatchedTransport(transport, batch))
        self.flow = _Flow(self.transport)
        if secure is not None:
            secure.pause_early()
        self._context = copy_context()
        full = self.overflow(len(self.connections), transport.get_extra_info("socket"))
        if full is None:
            self._watch()
            return
        self._refuse(TOO_MANY, full.why)
        if full.at_once:
            self._let_go()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        for timer in (self._timer, self._sending, self._idle, self._leaving):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends, until it is refused; what comes behind a request that is whole, in its turn."""
        begin = 0
        if not self._rest:
            while begin < len(data) and self._is_free():
                # What surrounds a body is counted from the last part that had some of it.
                most = begin + self.max_head
                found = data.find(_END, begin + _STEP, most)
                end = most if found < 0 else found + len(_END)
                self._take(memoryview(data)[begin:end])
                begin = end
        if begin < len(data) and not self._deaf:
            self._rest += data[begin:]
            if len(self._rest) > HIGH_WATER_LIMIT:
                self.flow.is_full = True
                self.flow.pause_reading()

    def _is_free(self) -> bool:
        """Tell whether there is nothing in line but what may be in need of the rest of its body."""
        if self._deaf or self.pipeline:
            return False
        return not self._in_head or self.cycle is None or self.cycle.response_complete

    def _take_rest(self) -> None:
        """Go on with what has come already."""
        rest, self._rest = self._rest, b""
        self.flow.is_full = False
        self.flow.resume_reading()
        if rest:
            self.data_received(rest)

    def _take(self, data: memoryview) -> None:
        self._size += len(data)
        rest = data
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                except HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]  # what comes behind the head
                else:
                    break
                self._reread_head()
        except HttpParserError as error:
            self._refuse(MALFORMED, what_is_wrong(error))
        if self._in_head and self._size and not self._deaf:  # the rest is still to come
            self._watch()
        if self._size > self.max_head:
            self._refuse(TOO_LARGE)

    def pause_writing(self) -> None:
        """Begin to wait for the client to take something."""
        super().pause_writing()
        self._acknowledged = acknowledged(self.transport)
        self._sending = self.loop.call_later(self.send_timeout, self._leave)

    def resume_writing(self) -> None:
        """Go on sending."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        super().resume_writing()
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = self.loop.call_later(LAST_STAGE, self._let_go)

    def on_message_begin(self) -> None:
        """Wait for the rest of a head, also of one that came with the end of another request."""
        self.url = b""
        self.headers = []
        self._size = self._size or 1  # a head that began with the end of another request

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer, which comes when it is too late to look at it, is dropped (RFC 9110, 6.5.1)."""
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Let the app have the request, if its head is within bounds and means one thing."""
        version = self.parser.get_http_version()
        try:
            expects_100_continue = check_head(version, self.url, self.headers, self.max_head)
        except HeadTooLargeError:
            self._refuse(TOO_LARGE)
            raise
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise MalformedHeadError("a method that is not known here")
            return  # it is read once more
        self._in_head = False
        self._size = 0
        if self._timer is not None:
            self._unwatch()
        url = parse_url(self.url)
        raw_path = url.path
        path = raw_path.decode("ascii")
        scope: HTTPScope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": self.parser.get_method().decode("ascii"),
            "root_path": self.root_path,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "state": self.app_state.copy(),
            "extensions": {EXTENSION: self},  # type: ignore[dict-item]  # servers may have their own
        }
        if not url.query and self.url.endswith(b"?"):
            scope["extensions"][EMPTY_QUERY] = {}
        before = self.cycle
        self.cycle = cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,  # the app has one of its own
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        cycle.loop, cycle.close = self.loop, self._close
        if version == "1.0":  # the only request of its connection
            self.app = close_delimited(self.app)
        if before is None or before.response_complete:
            self._start(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._size = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Expect another head."""
        if self._in_head:
            return  # of one that is read once more
        self._in_head = True
        self._size = 0
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Go on with what waits in line, or wait for another request."""
        self.server_state.total_requests += 1
        if self._finishing or self._leaving is not None or self.transport.is_closing():
            return
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start(cast("Cycle", cycle), app)
        elif self._last_word is not None:
            self._say_last(self._last_word)
            return
        else:
            self._idle_since = self.loop.time()
            if self._idle is None:
                self._idle = self.loop.call_later(self.timeout_keep_alive, self._be_idle)
        if self._rest or self.flow.read_paused:
            self._take_rest()

    def _reread_head(self) -> None:
        """Have a new parser read the head anew, without its upgrade, and go on from there.

        llhttp ends a request that asks for one with its head, and would take the body for the next request.
        """
        parser = self.parser
        head = without_upgrade(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(head)

    def _start(self, cycle: Cycle, app: ASGI3Application) -> None:
        self._idle_since = None
        self.answered = cycle
        task = self.loop.create_task(cycle.run_asgi(app), context=self._context.copy())
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout, self._be_late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _be_late(self) -> None:
        self._timer = None
        answered = self.answered
        if answered is not None and not answered.response_complete:
            self._watch()  # whoever still waits for an answer has time for the next head
        else:
            self._refuse(LATE)

    def _be_idle(self) -> None:
        self._idle = None
        if self._idle_since is None or self._timer is not None:
            return  # the end of what is being answered begins anew, and a head that has begun has a time of its own
        if (until := self._idle_since + self.timeout_keep_alive) > self.loop.time():
            self._idle = self.loop.call_at(until, self._be_idle)
        else:
            self.finish()

    def _leave(self) -> None:
        before, self._acknowledged = self._acknowledged, acknowledged(self.transport)
        if self._acknowledged > before:  # slow, and still there
            self._sending = self.loop.call_later(self.send_timeout, self._leave)
            return
        self._warn(f"A client took nothing for {self.send_timeout:g} seconds")
        self._untaken = True
        self.transport.abort()

    def _refuse(self, rejection: Rejection, why: str | None = None) -> None:
        self._unwatch()
        if self._deaf or self.transport.is_closing():
            return
        self._deaf = True
        what = f"{rejection.phrase}, {why or f'{self._size} bytes of a head'}"
        self._warn(what)
        response = rejection.response(what)
        answered = self.answered
        at_fault = None if self._in_head else self.cycle  # if it is no head, it is a body
        if self.pipeline and self.pipeline[0][0] is at_fault:
            self.pipeline.popleft()
        if answered is None or answered.response_complete:
            self._say_last(response)
        elif answered is not at_fault:
            self._last_word = response
        elif answered.response_started:  # in whose midst nothing else can be said
            self.transport.close()
        else:
            self.rejection = rejection
            self._say_last(response)
            self.tell()  # who is still at work on an answer

    def cut(self) -> None:
        """End the connection now, whatever is still to be taken by the client."""
        if self.transport is not None:
            if self.transport.get_write_buffer_size():
                self._warn("An answer was cut off, of which a client had not taken all")
            self.transport.abort()

    def _say_last(self, response: bytes) -> None:
        self.transport.write(response)
        self._close_in_stages()

    def _close(self) -> None:
        """Close the connection after an answer."""
        if self._rest or (self.answered is not None and self.answered.more_body):
            self._close_in_stages()
        else:
            self.finish()

    def _close_in_stages(self) -> None:
        """Close the connection after a last word to a client that may still be sending.

        If it were closed at once, what comes then would be answered by a reset, which makes the client's side drop the
        word before it is read (RFC 9112, 9.6).
        """
        self._deaf = True
        self._unwatch()
        self._take_rest()
        say_no_more(self.transport)
        self._leaving = self.loop.call_later(LAST_STAGE, self._let_go)

    def _let_go(self) -> None:
        """Close the connection, whatever becomes of the last word; not before it could be taken."""
        if self.flow.write_paused:
            return  # it is the end of that from which on there is little time
        if self.transport.can_write_eof():
            self.transport.close()
        else:  # TLS would wait for the client to say good-bye
            self.transport.abort()


def guarded(
    *,
    max_head: int,
    head_timeout: float,
    send_timeout: float = GuardedProtocol.send_timeout,
    max_connections: int | None = None,
    max_descriptor: int | None = None,
) -> type[GuardedProtocol]:
    """Make the protocol with these bounds, for a server without WebSockets."""
    bounds = {
        "max_head": max_head,
        "head_timeout": head_timeout,
        "send_timeout": send_timeout,
        "max_connections": max_connections,
        "max_descriptor": max_descriptor,
    }
    return type("Guarded", (GuardedProtocol,), bounds)
