"""One request on its way through the sidecar: carried to a door, and answered.

A client that leaves ends the call. Who may ask for what is `asked`'s to say, and what the call goes through on the way
the door's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import anyio
from opentelemetry import context as otel_context
from opentelemetry import propagate
from starlette.types import Message, Receive, Scope, Send

from resilient_llm.context import Ambient, current
from resilient_llm.message import Headers, header
from resilient_llm.providers import classify_exception
from resilient_llm.sidecar.asked import ROUTES, Asked, deadline_in, is_list
from resilient_llm.sidecar.browser import Browser
from resilient_llm.sidecar.departure import connection_of, unless_gone
from resilient_llm.sidecar.headers import for_client
from resilient_llm.sidecar.inbound import Inbound, read_body
from resilient_llm.sidecar.masked import without_secrets
from resilient_llm.sidecar.models import model_list
from resilient_llm.sidecar.refusal import RefusedError, dated, plain, refusal
from resilient_llm.streams import BufferedStream

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context

    from resilient_llm._loop import EventLoop
    from resilient_llm.call import Call, CallNext
    from resilient_llm.client import ClientDoor
    from resilient_llm.message import ByteStream, Reply
    from resilient_llm.sidecar.access_log import Entry
    from resilient_llm.sidecar.build import Setup
    from resilient_llm.sidecar.tables import Tenant

__all__ = ["CutShortError", "Exchange", "witness"]

logger = logging.getLogger("resilient_llm")

_LAST_WORD = 1.0
_EVENTS = b"text/event-stream"


class CutShortError(Exception):
    """A reply that broke off after it had begun: all that is left is to break off this side, too."""


def witness(call: Call, call_next: CallNext) -> Awaitable[Reply]:
    """Note the call on the request that it was made of: a policy that stands outermost and does nothing else."""
    request = call.request
    if isinstance(request, Inbound):
        request.call = call
    return call_next(call)


class Exchange:
    """Answer one request under a configuration, and fill in the entry for it.

    `first` has the first value of each of its headers.
    """

    def __init__(  # noqa: PLR0917 - what ASGI gives, in its order, and what is known of it
        self,
        setup: Setup,
        loop: EventLoop,
        scope: Scope,
        receive: Receive,
        send: Send,
        entry: Entry,
        first: Mapping[bytes, bytes],
    ) -> None:
        self._setup = setup
        self._loop = loop
        self._scope = scope
        self._receive = receive
        self._send = send
        self._entry = entry
        self._headers: Headers = scope["headers"]
        self._method: str = scope["method"]
        self._connection = connection_of(scope)
        self._first = first
        self._browser = Browser(first, setup.config.server.cors_origins) if b"origin" in first else None
        self._complete = False
        self.has_begun = False
        """Whether some of the response is on its way."""

    async def answer(self) -> None:
        """Answer the request, whatever it is.

        Raises `CutShortError` for a reply that broke off, and `ClientGoneError`.
        """
        try:
            await self._answer()
        except RefusedError as error:
            self._entry.refused(error.status, error.code)
            headers = error.headers
            if self._has_large_body():
                headers = [(b"connection", b"close"), *(h for h in headers if h[0] != b"connection")]
            error.headers = headers
            await self._say(*refusal(error, self._entry.path, self._method, self._own_headers()))

    async def _answer(self) -> None:
        setup, entry = self._setup, self._entry
        asked = Asked(setup, self._scope, self._first, self._browser)
        entry.path = asked.shown
        path = asked.path()
        if self._method == "OPTIONS":
            await self._options(path)
            return
        tenant = asked.tenant()
        entry.tenant = name = asked.tenant_name
        for_model = path in ROUTES
        if not for_model and is_list(path) and setup.models:
            await self._list_models(path, tenant)
            return
        door, entry.target = asked.door(path, tenant)
        server = setup.config.server
        body = await read_body(
            self._receive,
            self._headers,
            self._first,
            max_size=server.max_body,
            patience=server.body_timeout,
            at_most=server.deadline,
            connection=self._connection,
        )
        request = asked.request(path, body)
        if for_model:
            entry.model = asked.model(request)
            asked.check_model(request, tenant)
        else:
            asked.check_name(request)
        await self._carry(door, request, name, tenant)

    async def _carry(
        self, door: ClientDoor, request: Inbound, name: str | None, tenant: Tenant | None
    ) -> None:
        """Carry the request through the door while listening for the client's leaving."""
        deadline = deadline_in(self._first)
        trace = _continue_trace(self._first)
        ambient = (
            _ambient(name, 0, None) if tenant is None else _ambient(name, tenant.priority, tenant.purpose)
        )
        inherited = current.set(ambient if deadline == math.inf else replace(ambient, deadline=deadline))
        try:
            await unless_gone(
                partial(self._relay, door, request),
                self._left,
                loop=self._loop,
                connection=self._connection,
                receive=self._receive,
            )
        finally:
            current.reset(inherited)
            if trace is not None:
                otel_context.detach(trace)
            self._entry.call = request.call
            request.call = None  # which has the request: both would be left to the garbage collector

    async def _relay(self, door: ClientDoor, request: Inbound) -> None:
        try:
            reply = await door.handle(request, self._loop)
        except Exception as error:
            if classify_exception(error) is None:
                raise  # a defect, and none of the network's
            logger.warning("no reply for request %s: %s", self._entry.request_id, type(error).__name__)
            raise RefusedError(502, "bad_gateway", "The provider could not be reached.") from None
        try:
            await self._send_reply(reply, request)
        except BaseException:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _LAST_WORD):
                await reply.stream.aclose()
            raise
        await reply.stream.aclose()  # all of it is read: there is nothing to wait for

    async def _send_reply(self, reply: Reply, request: Inbound) -> None:
        status = reply.status
        if not 200 <= status <= 599:
            raise RefusedError(502, "bad_gateway", "The provider's reply is none that could be passed on.")
        if status == 401:
            # Who asks has shown a key that is right; that the one of this side is not is nothing they can mend.
            raise RefusedError(
                502, "provider_credentials", "The provider refused the credentials of the sidecar."
            )
        kind = header(reply.headers, b"content-type") or b""
        bodiless = self._method == "HEAD" or status in (204, 304)
        # A stream of events may have become shorter or longer on its way: one more event, or one less.
        headers = for_client(reply.headers, sized=status != 204 and not kind.lower().startswith(_EVENTS))
        stream: ByteStream = reply.stream
        if status >= 400 and not bodiless:
            try:
                stream, headers = await without_secrets(stream, headers, self._setup.secrets)
            except Exception as error:
                raise RefusedError(502, "bad_gateway", "The provider's error broke off.") from error
        self._entry.replied(status, headers)
        headers += self._own_headers()
        limits = self._setup.limits_of(self._entry.tenant)
        if limits is not None and request.call is not None:
            headers += limits(request.call, headers)
        if header(headers, b"date") is None:
            headers.append(dated())
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        body = b""
        if isinstance(stream, BufferedStream) and stream.whole:
            body = b"".join(stream.chunks)
        else:
            await self._send_body(stream, discard=bodiless)
        self._complete = True
        await self._send({"type": "http.response.body", "body": b"" if bodiless else body})

    async def _send_body(self, stream: ByteStream, *, discard: bool) -> None:
        chunks = stream.__aiter__()
        while True:
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except Exception as error:
                raise CutShortError from error
            if chunk and not discard:
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _left(self) -> bool:
        """Note that the client is gone, unless it had all it wanted: then it means only that it is over."""
        if not self._complete:
            self._entry.left = True
        return not self._complete

    async def _list_models(self, path: str, tenant: Tenant | None) -> None:
        if self._method not in ("GET", "HEAD"):
            raise RefusedError(
                405, "method_not_allowed", "Ask here by GET.", [(b"allow", b"GET, HEAD, OPTIONS")]
            )
        names = self._setup.models
        if tenant is not None and tenant.models is not None:
            names = [name for name in names if name in tenant.models]
        anthropic = b"anthropic-version" in self._first
        body = model_list(names, path.removeprefix("/v1/models").removeprefix("/"), anthropic=anthropic)
        if body is None:
            raise RefusedError(404, "model_not_found", "This model does not exist, or is not for you.")
        self._entry.replied(200, [])
        await self._say(
            *plain(200, body, [(b"content-type", b"application/json"), *self._own_headers()], self._method)
        )

    async def _options(self, path: str) -> None:
        """Answer a browser that asks whether it may, and anybody who asks what can be done."""
        methods = b"GET, HEAD, POST, OPTIONS"
        if path in ROUTES:
            methods = b"POST, OPTIONS"
        elif is_list(path):
            methods = b"GET, HEAD, OPTIONS"
        page = Browser(self._first, self._setup.config.server.cors_origins)
        headers = page.preflight(methods)
        self._entry.replied(204, [])
        await self._say(*plain(204, b"", [*headers, *self._own_headers()], "OPTIONS"))

    def _own_headers(self) -> Headers:
        request_id = (b"x-resilient-llm-request-id", self._entry.request_id.encode())
        return [request_id] if self._browser is None else [request_id, *self._browser.headers()]

    def _has_large_body(self) -> bool:
        size = self._first.get(b"content-length")
        chunked = b"transfer-encoding" in self._first
        return chunked or (size is not None and len(size) > 5)

    async def _say(self, *messages: Message) -> None:
        self.has_begun = True
        for message in messages:
            await self._send(message)


@lru_cache(maxsize=1024)
def _ambient(tenant: str | None, priority: int, purpose: str | None) -> Ambient:
    return Ambient(tenant=tenant, priority=priority, purpose=purpose)


def _continue_trace(first: Mapping[bytes, bytes]) -> Token[Context] | None:
    """Make the call a part of the trace that the client has begun."""
    if b"traceparent" not in first and b"tracestate" not in first:
        return None
    carrier = {
        name.decode(): first[name].decode("latin-1")
        for name in (b"traceparent", b"tracestate")
        if name in first
    }
    return otel_context.attach(propagate.extract(carrier))
