"""A ready LLM client for an app's handlers, made once and closed at shutdown.

Only wiring: what its policies do is the client door's, and whose calls they are the context says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from resilient_llm._options import function, one_of, synchronous, takes
from resilient_llm.asgi.lifespan import Lifespan
from resilient_llm.asgi.workers import warn_of_workers
from resilient_llm.errors import ConfigurationError

if TYPE_CHECKING:
    import httpx
    import httpx2

    from resilient_llm.call import Policy
    from resilient_llm.client import OnRejection
    from resilient_llm.httpx import ResilientTransport
    from resilient_llm.httpx2 import ResilientTransport as ResilientTransport2
    from resilient_llm.telemetry import Telemetry

__all__ = ["LLMMiddleware"]

Transport: TypeAlias = "httpx.AsyncBaseTransport | httpx2.AsyncBaseTransport"
Resilient: TypeAlias = "ResilientTransport | ResilientTransport2"


class LLMMiddleware:
    """Put a client whose calls go through `policies` into `request.state`.

    `transport` is an async transport of httpx or httpx2, which decides the library; without one, a new
    transport of `library` is made. `client` makes what handlers get from the transport with the policies
    around it: by default an `AsyncClient` of that library; a function such as
    `lambda transport: AsyncOpenAI(http_client=httpx2.AsyncClient(transport=transport))` gives them an SDK.
    It is made at the first request and lies under `request.state.<state_name>`; the transport is closed when
    the app has shut down, or could not start. An app without a lifespan does neither, and keeps it open.

    Raises `ConfigurationError` and `TypeError` for options that cannot work, `ImportError` where httpx2 is
    asked for and not installed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        transport: Transport | None = None,
        policies: Sequence[Policy] = (),
        client: Callable[[Resilient], object] | None = None,
        library: Literal["httpx", "httpx2"] = "httpx",
        state_name: str = "llm",
        on_rejection: OnRejection = "respond",
        name: str = "client",
        telemetry: Telemetry | None = None,
    ) -> None:
        function(asynchronous=True, arguments=3, app=app)
        if not isinstance(state_name, str) or not state_name.isidentifier() or iskeyword(state_name):
            msg = f"state_name={state_name!r}: allowed are names that can follow `request.state.`"
            raise ConfigurationError(msg)
        one_of(("httpx", "httpx2"), library=library)
        if client is not None and not callable(client):
            raise ConfigurationError(f"client={client!r}: allowed are functions of the transport, and None")
        synchronous(client=client)
        takes(1, client=client)
        self.app = app
        self._state_name = state_name
        self._client: object = None
        self._make = client
        self._transport: Resilient
        if library == "httpx" if transport is None else not _is_of_httpx2(transport):
            from resilient_llm.httpx import ResilientTransport  # noqa: PLC0415 - slow to load, and not for the sidecar

            self._transport = ResilientTransport(
                cast("httpx.AsyncBaseTransport | None", transport),
                policies=policies,
                on_rejection=on_rejection,
                name=name,
                telemetry=telemetry,
            )
        else:
            from resilient_llm.httpx2 import ResilientTransport as ResilientTransport2  # noqa: PLC0415 - an extra

            self._transport = ResilientTransport2(
                cast("httpx2.AsyncBaseTransport | None", transport),
                policies=policies,
                on_rejection=on_rejection,
                name=name,
                telemetry=telemetry,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the client to a request, and close its transport after the app's shutdown."""
        if scope["type"] in ("http", "websocket"):
            scope.setdefault("state", {})[self._state_name] = self._ready()
            await self.app(scope, receive, send)
        elif scope["type"] == "lifespan":
            warn_of_workers(self._transport.pipeline.policies)
            what = f"the transport of {self._transport.pipeline.name!r}"
            await Lifespan(receive, send, close=self._close, what=what).run(self.app, scope)
        else:
            await self.app(scope, receive, send)

    def _ready(self) -> object:
        if self._client is None:
            self._client = (
                _async_client(self._transport) if self._make is None else self._make(self._transport)
            )
        return self._client

    async def _close(self) -> None:
        self._client = None
        await self._transport.aclose()


def _is_of_httpx2(transport: object) -> bool:
    """Tell whether a transport is one of httpx2, which may not be installed; what is neither's is httpx's to refuse."""
    return any(base.__module__.partition(".")[0] == "httpx2" for base in type(transport).__mro__)


def _async_client(transport: Resilient) -> object:
    import httpx  # noqa: PLC0415 - it is loaded already if it is httpx's

    if isinstance(transport, httpx.AsyncBaseTransport):
        return httpx.AsyncClient(transport=transport)
    import httpx2  # noqa: PLC0415 - an extra

    return httpx2.AsyncClient(transport=transport)
