"""aiohttp's connections, made so that a reply is whole or a failure, and an abandoned one is gone at once.

What aiohttp leaves open is closed here, and what a caller must know of a connection to send again is kept. No
request or reply is touched.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler

from resilient_llm.transports.stale import was_closed_before

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

__all__ = ["Connector", "Exchange", "current"]


class Exchange:
    """One request on its way: what connection it has, and whether it must have a new one."""

    __slots__ = ("_protocol", "fresh")

    def __init__(self) -> None:
        self.fresh = False
        self._protocol: _Protocol | None = None

    def use(self, protocol: _Protocol | None) -> None:
        """Note the connection that the request is sent on; none while it waits for one."""
        self._protocol = protocol

    @property
    def stale(self) -> bool:
        """Tell whether its connection is over as if the server had closed it before this request came."""
        protocol = self._protocol
        return protocol is not None and was_closed_before(
            uses=protocol.uses, heard=protocol.heard, age=protocol.age()
        )


current: ContextVar[Exchange] = ContextVar("resilient_llm_aiohttp_exchange")


class _Protocol(ResponseHandler):
    """A connection that says what became of it, and leaves at once."""

    uses = 0
    _since = 0.0
    heard = False
    """Something came in answer to the request that has it, or had it last."""
    idle = False
    unasked = False
    """Something came that nobody had asked for."""

    def data_received(self, data: bytes) -> None:
        if data:  # none when aiohttp reads on after a pause
            self.heard = True
            self.unasked = self.idle
        super().data_received(data)

    def use(self) -> None:
        """Belong to a request."""
        self.uses += 1
        self._since = self._loop.time()
        self.heard = self.idle = False

    def age(self) -> float:
        """Give the seconds since it was given the request that has it, or had it last."""
        return self._loop.time() - self._since

    def rest(self) -> None:
        """Belong to none."""
        self.idle = True

    def close(self) -> None:
        # To close is to wait until all is written, or for a TLS peer to say good-bye: who is not read is not done.
        payload, transport = self._payload, self.transport
        if transport is not None:
            transport.abort()
        super().close()
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientConnectionError("Connection closed"))

    def connection_lost(self, exc: BaseException | None) -> None:
        payload = self._payload
        if exc is not None and payload is not None and not payload.is_eof():
            # aiohttp takes the reset of a body that ends with its connection for its end.
            error = aiohttp.ClientOSError(*exc.args)
            error.__cause__ = exc
            payload.set_exception(error)
        super().connection_lost(exc)
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            # The parser has given up on what it read, and told nobody who reads the body.
            payload.set_exception(aiohttp.ClientPayloadError("Response payload is malformed"))


class Connector(aiohttp.TCPConnector):
    """Connect as `aiohttp.TCPConnector` does, for an `AiohttpTransport`.

    A connection to which something came while it was idle is not used again, one that is given up is
    aborted, and a body that ends with a reset is a failure. Takes the options of `aiohttp.TCPConnector`.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # its own to check
        self._factory = partial(_Protocol, loop=self._loop)  # type: ignore[assignment]  # is invariant

    async def connect(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's
    ) -> Connection:
        """Give a connection for a request, from the pool where one is fit."""
        exchange = current.get(None)
        if exchange is not None:
            exchange.use(None)
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            if not isinstance(protocol, _Protocol):
                return connection
            unfit = protocol.unasked or protocol.should_close or (exchange is not None and exchange.fresh)
            if protocol.uses and unfit:
                connection.close()
                continue
            protocol.use()
            connection.add_callback(protocol.rest)
            if exchange is not None:
                exchange.use(protocol)
            return connection
