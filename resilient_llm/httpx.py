"""The client door for httpx: `httpx.AsyncClient(transport=ResilientTransport(policies=[...]))`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import httpx

from resilient_llm.transports.httpx_family import Family, FamilyTransport

if TYPE_CHECKING:
    from resilient_llm.call import Policy
    from resilient_llm.client import OnRejection
    from resilient_llm.telemetry import Telemetry

__all__ = ["ResilientTransport"]


class ResilientTransport(FamilyTransport, httpx.AsyncBaseTransport):
    """Put policies under an `httpx.AsyncClient`.

    `transport` is any httpx async transport; by default a new `httpx.AsyncHTTPTransport` whose pool
    is never the queue. `on_rejection="respond"` answers refused calls in the provider's error format,
    `"raise"` raises `RejectedError`. Raises `ConfigurationError` for policies that cannot work together
    and `TypeError` for a transport of another kind.
    """

    _family: ClassVar[Family] = Family(httpx)

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        policies: Sequence[Policy] = (),
        on_rejection: OnRejection = "respond",
        name: str = "client",
        telemetry: Telemetry | None = None,
    ) -> None:
        self._build(transport, policies=policies, on_rejection=on_rejection, name=name, telemetry=telemetry)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request; what `httpx.AsyncClient` calls."""
        return cast("httpx.Response", await self._handle(request))
