"""One request on its way through the sidecar: carried to a door, and answered.

A client that leaves ends the call. Who may ask for what is `asked`'s to say, and what the call goes through on the way
the door's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
from opentelemetry import context as otel_context
from opentelemetry import propagate
from starlette.types import Message, Receive, Scope, Send

from resilient_llm.event_stream import EventStream
from resilient_llm.message import Headers, header
from resilient_llm.providers import classify_exception
from resilient_llm.sidecar.asked import ROUTES, Asked, is_list
from resilient_llm.sidecar.browser import Browser
from resilient_llm.sidecar.disconnect import UnlessGone, connection_of, listening
from resilient_llm.sidecar.headers import for_client
from resilient_llm.sidecar.inbound import ClientBody, read_body
from resilient_llm.sidecar.masked import leaks, without_secrets
from resilient_llm.sidecar.models import model_list
from resilient_llm.sidecar.refusal import RefusedError, dated, plain, refusal
from resilient_llm.streams import BufferedStream

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context

    from resilient_llm._loop import EventLoop
    from resilient_llm.call import Call
    from resilient_llm.client import ClientDoor
    from resilient_llm.context import Ambient
    from resilient_llm.message import ByteStream, Reply, Request
    from resilient_llm.sidecar.access_log import Entry
    from resilient_llm.sidecar.build import Setup

__all__ = ["CutShortError", "Exchange"]

logger = logging.getLogger("resilient_llm")

_LAST_WORD = 1.0
_EVENTS = b"text/event-stream"
_TRACE = (b"traceparent", b"tracestate")


class CutShortError(Exception):
    """A reply that broke off after it had begun: all that is left is to break off this side, too."""


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
        self._upload: ClientBody | None = None
        self.has_begun = False
        """Whether some of the response is on its way."""

    async def answer(self) -> None:
        """Answer the request, whatever it is.

        Raises `CutShortError` for a reply that broke off, and `ClientGoneError`.
        """
        trace: Token[Context] | None = None
        try:
            asked = await self._asked()
            if asked is None:
                return
            door, request, ambient = asked
            if b"traceparent" in self._first:
                trace = _continue_trace(request)
            call = self._entry.call = door.begin(request, self._loop, ambient)
            if self._setup.secrets:
                call.masked = self._setup.secrets.masked
            if self._connection is None:
                await listening(partial(self._relay, door, call), self._left, self._receive)
                return
            late: Reply | None = None
            with UnlessGone(self._connection, self._left, self._loop) as call.scope:
                late = await self._relay(door, call)
            if late is None and not (self._complete or self._entry.left):  # the deadline has cancelled it
                late = door.too_late(call)
            if late is not None:
                with UnlessGone(self._connection, self._left, self._loop):
                    await self._pass_on(late)
        except RefusedError as error:
            await self._refuse(error)
        finally:
            if trace is not None:
                otel_context.detach(trace)

    async def delivered(self) -> None:
        """Wait until the client has taken the most of what was sent, and note it if it leaves before."""
        connection = self._connection
        if connection is not None and connection.is_behind():
            self._entry.untaken = not await connection.taken()

    async def _asked(self) -> tuple[ClientDoor, Request, Ambient] | None:
        """Find out what is to be carried where, and for whom; `None` where the request is answered here."""
        setup, entry = self._setup, self._entry
        asked = Asked(setup, self._scope, self._first, self._browser)
        entry.path = asked.shown
        if b"x-request-id" in self._first and asked.has_key(entry.request_id.encode()):
            entry.rename()
        path = asked.path()
        if self._method == "OPTIONS":
            await self._options(path)
            return None
        tenant = asked.tenant()
        entry.tenant = asked.tenant_name
        for_model = path in ROUTES
        if not for_model and is_list(path):
            names = asked.listed(tenant)
            if names is not None:
                await self._list_models(path, names)
                return None
        door, target = asked.door(path, tenant)
        entry.target = target
        server = setup.config.server
        if target is not None and self._connection is not None and asked.is_upload():
            self._upload = ClientBody(
                self._receive, self._first, max_size=server.max_upload, patience=server.body_timeout
            )
            request = asked.upload(path, self._upload, target)
            asked.check_name(request)
            return door, request, asked.ambient(tenant)
        body = await read_body(
            self._receive,
            self._headers,
            self._first,
            max_size=server.max_body,
            patience=server.body_timeout,
            at_most=server.deadline,
            connection=self._connection,
        )
        request = asked.request(path, body, target)
        if for_model:
            entry.model = asked.model(request)
            asked.check_model(request, tenant)
        else:
            asked.check_name(request)
        return door, request, asked.ambient(tenant)

    async def _relay(self, door: ClientDoor, call: Call) -> Reply | None:
        """Get a reply and pass it on; gives it back if it came just when the deadline cancelled the scope."""
        try:
            reply = await door.carry(call)
        except Exception as error:
            if classify_exception(error) is None:
                raise  # a defect, and none of the network's
            logger.warning("no reply for request %s: %s", self._entry.request_id, type(error).__name__)
            raise RefusedError(502, "bad_gateway", "The provider could not be reached.") from None
        if call.scope is not None and call.scope.cancel_called:
            return reply
        await self._pass_on(reply)
        return None

    async def _pass_on(self, reply: Reply) -> None:
        """Send a reply, and close it however that ends."""
        stream: ByteStream = reply.stream
        try:
            status = reply.status
            headers = self._passed(reply)
            bodiless = self._method == "HEAD" or status in (204, 304)
            if (status >= 300 or self._has_failed()) and not bodiless:
                try:
                    stream, headers = await without_secrets(stream, headers, self._setup.secrets)
                except Exception as error:
                    raise RefusedError(502, "bad_gateway", "The provider's error broke off.") from error
            self._complete_head(status, headers)
            self.has_begun = True
            body: bytes | None = None
            if isinstance(stream, BufferedStream) and stream.whole:
                body = b"" if bodiless else b"".join(stream.chunks)
            if body is None or self._connection is None or not self._connection.answer(status, headers, body):
                await self._send({"type": "http.response.start", "status": status, "headers": headers})
                if body is None:
                    await self._send_body(stream, discard=bodiless)
                self._complete = True
                await self._send({"type": "http.response.body", "body": body or b""})
            self._complete = True
        except BaseException:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _LAST_WORD):
                await reply.stream.aclose()
            raise
        await reply.stream.aclose()  # all of it is read: there is nothing to wait for

    def _passed(self, reply: Reply) -> Headers:
        """Give the headers of a reply that go to the client; raises `RefusedError` if it is not one for them."""
        status = reply.status
        if not 200 <= status <= 599:
            raise RefusedError(502, "bad_gateway", "The provider's reply is none that could be passed on.")
        if status == 401:
            # Who asks has shown a key that is right; that the one of this side is not is nothing they can mend.
            raise RefusedError(
                502, "provider_credentials", "The provider refused the credentials of the sidecar."
            )
        kind = header(reply.headers, b"content-type") or b""
        # A stream of events may have become shorter or longer on its way: one more event, or one less.
        sized = status != 204 and not kind.lower().startswith(_EVENTS)
        return for_client(reply.headers, sized=sized, secrets=self._setup.secrets)

    def _has_failed(self) -> bool:
        """Tell whether the call is known to have failed by now, whatever the status says."""
        outcome = None if self._entry.call is None else self._entry.call.outcome
        return outcome is not None and not outcome.ok

    def _complete_head(self, status: int, headers: Headers) -> None:
        """Note what is sent, and add to its headers what is this side's to say."""
        named = dict(headers)
        self._entry.replied(status, named)
        headers += self._own_headers()
        if self._upload is not None and not self._upload.complete:
            headers.append((b"connection", b"close"))  # whatever is still to come is for nobody
        limits = self._setup.limits_of(self._entry.tenant)
        if limits is not None and self._entry.call is not None:
            headers += limits(self._entry.call, headers)
        if b"date" not in named:
            headers.append(dated())

    async def _send_body(self, stream: ByteStream, *, discard: bool) -> None:
        if isinstance(stream, EventStream) and stream.whole_events and not discard:
            outlet = None if self._connection is None else self._connection.outlet()
            if outlet is not None:
                stream.put_into(outlet)
        chunks = stream.__aiter__()
        while True:
            try:
                chunk: bytes | None = await anext(chunks)
            except StopAsyncIteration:
                return
            except Exception as error:
                raise CutShortError from error
            if leaks(stream):
                raise CutShortError
            if chunk and self._has_failed():
                chunk = self._setup.secrets.masked(chunk)
            if chunk and not discard:
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _left(self) -> bool:
        """Note that the client is gone, unless it had all it wanted: then it means only that it is over."""
        if not self._complete:
            self._entry.left = True
        return not self._complete

    async def _list_models(self, path: str, names: Sequence[str]) -> None:
        anthropic = b"anthropic-version" in self._first
        body = model_list(names, path.removeprefix("/v1/models").removeprefix("/"), anthropic=anthropic)
        self._entry.replied(200, {})
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
        self._entry.replied(204, {})
        await self._say(*plain(204, b"", [*headers, *self._own_headers()], "OPTIONS"))

    async def _refuse(self, error: RefusedError) -> None:
        self._entry.refused(error.status, error.code)
        if self._entry.call is None:
            self._setup.count_refusal(error.code)
        size = self._first.get(b"content-length", b"")
        if len(size) > 5 or b"transfer-encoding" in self._first:  # more than is worth reading
            others = [one for one in error.headers if one[0] != b"connection"]
            error.headers = [(b"connection", b"close"), *others]
        await self._say(*refusal(error, self._entry.path, self._method, self._own_headers()))

    def _own_headers(self) -> Headers:
        request_id = (b"x-resilient-llm-request-id", self._entry.request_id.encode())
        return [request_id] if self._browser is None else [request_id, *self._browser.headers()]

    async def _say(self, *messages: Message) -> None:
        self.has_begun = True
        for message in messages:
            await self._send(message)


def _continue_trace(request: Request) -> Token[Context]:
    """Make the call a part of the trace that the client has begun, by what of it goes on."""
    carrier = {
        name.decode(): value.decode("latin-1") for name, value in reversed(request.headers) if name in _TRACE
    }
    return otel_context.attach(propagate.extract(carrier))
