"""The client door over aiohttp: `ResilientSession(policies=[...]).request("POST", url, body=...)`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from resilient_llm.client import ClientDoor, OnRejection
from resilient_llm.message import Reply, Request
from resilient_llm.transports.aiohttp import AiohttpTransport, Connector, LocalProtocolError, upload

if TYPE_CHECKING:
    from types import TracebackType

    from resilient_llm.call import Policy
    from resilient_llm.pipeline import Pipeline
    from resilient_llm.telemetry import Telemetry

__all__ = ["AiohttpTransport", "Connector", "LocalProtocolError", "ResilientSession", "upload"]


class ResilientSession:
    """Send requests through policies and aiohttp; bytes and headers as they are, on asyncio only.

    `transport` is by default a new `AiohttpTransport`, whose pool is never the queue.
    `on_rejection="respond"` answers refused calls in the provider's error format, `"raise"` raises
    `RejectedError`. Raises `ConfigurationError` for policies that cannot work together and `TypeError` for a
    transport of another kind.
    """

    def __init__(
        self,
        transport: AiohttpTransport | None = None,
        *,
        policies: Sequence[Policy] = (),
        on_rejection: OnRejection = "respond",
        name: str = "client",
        telemetry: Telemetry | None = None,
    ) -> None:
        if transport is None:
            transport = AiohttpTransport()
        if not isinstance(transport, AiohttpTransport):
            raise TypeError(f"transport must be an AiohttpTransport, not {transport!r}")
        self._transport = transport
        self._door = ClientDoor(
            transport,
            synthesise=transport.synthesise,
            errors=transport.errors,
            policies=policies,
            on_rejection=on_rejection,
            name=name,
            telemetry=telemetry,
        )

    @property
    def pipeline(self) -> Pipeline:
        """Give the pipeline, for `describe()`."""
        return self._door.pipeline

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        body: bytes | AsyncIterable[bytes] = b"",
    ) -> Reply:
        """Send a request, and give the reply once its head is there.

        Its `stream` is to be read to its end or closed. A body in pieces is read while it is sent. Raises what
        `send` raises.
        """
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        raw = [(key.encode(), value.encode()) for key, value in pairs]
        if isinstance(body, bytes):
            return await self.send(Request(method, url, raw, body))
        return await self.send(upload(method, url, raw, body))

    async def send(self, request: Request) -> Reply:
        """Send a neutral request.

        Raises aiohttp's exceptions when no policy owns the retries, `RejectedError` and `DeadlineExceededError`
        with `on_rejection="raise"`, and `EventLoopError` outside asyncio and its own event loop.
        """
        return await self._door.handle(request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the transport, and break off whatever is being read."""
        await self._transport.aclose()
