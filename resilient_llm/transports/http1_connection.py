"""One HTTP/1.1 connection of a client: a request out, its reply in, then the next.

A reply is whole or a failure, and a connection that is given up is gone at once. Which connection a request gets is for
the pool to say.
"""

from __future__ import annotations

import asyncio
import select
import ssl as tls
from collections.abc import AsyncIterator, Callable
from typing import cast

from resilient_llm.transports.batched import Batch, BatchedTransport
from resilient_llm.transports.failures import NetworkError, ReadError, RemoteProtocolError
from resilient_llm.transports.http1_incoming import Incoming
from resilient_llm.transports.http1_parser import ReplyParser
from resilient_llm.transports.http1_request import Origin
from resilient_llm.transports.stale import was_closed_before

__all__ = ["Connection"]

Told = Callable[["Connection"], None]
"""Is told of a connection that is connected, free, or closed."""


class Connection(asyncio.Protocol):
    """Carry one request at a time.

    `made` is told when it is connected, `rest` when it is done with a request and can have another, `gone` when it is
    closed.
    """

    __slots__ = (
        "_arrivals",
        "_batch",
        "_drained",
        "_gone",
        "_incoming",
        "_is_full",
        "_is_sent",
        "_loop",
        "_made",
        "_parser",
        "_rest",
        "_since",
        "_transport",
        "_upload",
        "closed",
        "heard",
        "idle_since",
        "origin",
        "uses",
    )

    def __init__(self, origin: Origin, batch: Batch, *, made: Told, rest: Told, gone: Told) -> None:
        self.origin = origin
        self.uses = 0
        self.heard = False
        """Something came in answer to the request that has it, or had it last."""
        self.closed = False
        self.idle_since = 0.0
        self._batch = batch
        self._loop = batch.loop
        self._made = made
        self._rest = rest
        self._gone = gone
        self._parser = ReplyParser()
        self._transport: asyncio.Transport | None = None
        self._incoming: Incoming | None = None
        """The reply that is expected; none while the connection is idle."""
        self._since = 0.0
        """When it was given the request that has it, or had it last."""
        self._is_sent = False
        self._upload: asyncio.Task[None] | None = None
        self._is_full = False
        self._drained: asyncio.Future[None] | None = None
        self._arrivals: select.poll | None = None
        """Says whether something has come that is not read yet, where the system can be asked."""

    @property
    def is_stale(self) -> bool:
        """Tell whether it is over as if the server had closed it before its last request came."""
        return was_closed_before(uses=self.uses, heard=self.heard, age=self._loop.time() - self._since)

    def expect(self, *, bodiless: bool) -> Incoming:
        """Belong to a request, and give its reply, which is still to come.

        To be called before `send`, and before it is connected: what refuses connections may answer at once.
        """
        self.uses += 1
        self.heard = self._is_sent = False
        self._since = self._loop.time()
        self._parser.begin(bodiless=bodiless)
        self._incoming = incoming = Incoming(self, self._loop)
        return incoming

    def send(self, request: bytes) -> None:
        """Send a request."""
        self._is_sent = True
        if self._transport is not None and not self.closed:
            self._transport.write(request)

    def upload(self, head: bytes, body: AsyncIterator[bytes], *, is_chunked: bool) -> None:
        """Send a request whose body is read while it is sent, no faster than it is sent."""
        if self._transport is not None and not self.closed:
            self._transport.write(head)
            self._upload = self._loop.create_task(self._send(self._transport, body, is_chunked=is_chunked))

    async def _send(
        self, transport: asyncio.Transport, body: AsyncIterator[bytes], *, is_chunked: bool
    ) -> None:
        try:
            async for piece in body:
                if not piece:
                    continue
                transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
                if self._is_full:
                    self._drained = self._loop.create_future()
                    await self._drained
            if is_chunked:
                transport.write(b"0\r\n\r\n")
            self._upload = None
            self._is_sent = True
        except asyncio.CancelledError:
            if self._upload is not None:  # else it is from here that it was cancelled
                self._upload = None
                self.fail(NetworkError("the upload was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - told to who reads the reply, as it is
            self._upload = None
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Close the connection at once; who waits for a reply, or reads it, hears why."""
        incoming, self._incoming = self._incoming, None
        self.abort()
        if incoming is not None:
            incoming.end(error)

    def abort(self) -> None:
        """Close the connection at once."""
        if self.closed:
            return
        # To close is to wait until all is written, or for a TLS peer to say good-bye: who is not read is not done.
        self.closed = True
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._parser.close()
        self._gone(self)  # uvloop does not always say so, of one whose making was cancelled

    def is_fit(self) -> bool:
        """Tell whether an idle connection can have another request: one on which nothing came, not even its end.

        The system is asked, since the event loop may not have read it yet, and it would be taken for the answer.
        """
        if self.closed or self._transport is None or self._transport.is_closing():
            return False
        return self._arrivals is None or not self._arrivals.poll(0)

    def pause_reading(self) -> None:
        """Let the network wait."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Let the network go on."""
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected, unless it was given up meanwhile."""
        self._transport = BatchedTransport(cast("asyncio.Transport", transport), self._batch)
        if self.closed:
            self._transport.abort()
        else:
            self._arrivals = _arrivals_at(self._transport)
            self._made(self)

    def data_received(self, data: bytes) -> None:
        """Take what the server sends."""
        incoming, parser = self._incoming, self._parser
        if incoming is None:  # nobody has asked
            self.abort()
            return
        self.heard = True
        parser.feed(data)
        if parser.status:
            incoming.feed(parser, len(data))
        if parser.complete:
            self._incoming = None
            incoming.end()
            if parser.keep_alive and not parser.unasked and self._is_sent and not self._is_full:
                self._rest(self)
            else:
                self.abort()
        elif parser.error is not None:
            self.fail(parser.error)

    def eof_received(self) -> None:
        """Hear that the server sends no more."""
        self._break_off(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Hear that the connection is closed."""
        self._break_off(exc)
        self._transport = None
        self.resume_writing()

    def _break_off(self, exc: Exception | None) -> None:
        incoming = self._incoming
        if incoming is None:
            self.abort()
        elif exc is not None:
            error = ReadError(f"the connection broke: {exc}")
            error.__cause__ = exc
            self.fail(error)
        elif self._parser.ends_with_connection() and self._is_said_good_bye():
            self._incoming = None
            self.abort()
            incoming.end()
        else:
            self.fail(RemoteProtocolError("the server closed the connection before its reply was whole"))

    def _is_said_good_bye(self) -> bool:
        """Tell whether it is the server that ends the connection, and not who stands between (RFC 9112, 9.8)."""
        secured = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        if secured is None:
            return not self.origin.tls
        try:
            return not secured.read(1)  # nothing, for ever, after a TLS closure alert; it wants more without
        except tls.SSLError:
            return False

    def pause_writing(self) -> None:
        """Hear that the network takes no more for now."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Hear that the network takes more."""
        self._is_full = False
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)


def _arrivals_at(transport: asyncio.Transport) -> select.poll | None:
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(select, "poll"):
        return None
    arrivals = select.poll()
    arrivals.register(sock.fileno(), select.POLLIN)
    return arrivals
