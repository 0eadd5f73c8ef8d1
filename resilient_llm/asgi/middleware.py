"""The middleware that puts policies around an app's HTTP requests.

Finds the tenant, takes the request through the pipeline, and turns what refused it into a response. How
messages travel is the exchange's; which policies make sense here, the pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, cast

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from resilient_llm._loop import EventLoop
from resilient_llm._options import at_least, flag, function, label, seconds
from resilient_llm.asgi.drain import Drain
from resilient_llm.asgi.exchange import Exchange
from resilient_llm.asgi.rate_limit_headers import rate_limit_headers
from resilient_llm.asgi.responses import FORMATS, ErrorFormat, Refusal, error_event, error_response
from resilient_llm.asgi.tenant import Known, TenantOf, Tenants
from resilient_llm.asgi.workers import warn_of_workers
from resilient_llm.call import Call
from resilient_llm.context import ambient, current
from resilient_llm.errors import ConfigurationError, DeadlineExceededError, RejectedError
from resilient_llm.message import Request
from resilient_llm.pipeline import Pipeline
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.profile import Profile
from resilient_llm.target import Target

if TYPE_CHECKING:
    from resilient_llm.call import Policy
    from resilient_llm.message import Reply
    from resilient_llm.telemetry import Telemetry

__all__ = ["ByScope", "ResilienceMiddleware"]

ByScope: TypeAlias = Callable[[Scope], bool]

_AS_PROBLEM = "the answer is in the format 'problem'"
_PROFILE = Profile(provider="asgi")


class ResilienceMiddleware:
    """Admit an app's HTTP requests by policies, tenant by tenant.

    `tenant` is the name of a header, a function of the scope (async or not), or `None` where tenants are not
    told apart. A request without one, or with one that is not among `known_tenants`, gets a 401, or
    `default_tenant` where that is given; a lookup that takes longer than `tenant_timeout` ends in a 503. What
    the policies refuse becomes a 429 or 503, a passed deadline a 504, in `error_format`.

    `cancel_on_disconnect` says, for all requests or by scope, whether a client that leaves before it is
    answered ends its handler; `None` means yes where there are policies. At most `max_buffered_body` bytes of
    a body are read ahead of the app. At shutdown new requests are refused and the app is told after
    `drain_timeout` seconds at most. Without policies the app runs as if it stood alone, but for its tenant.

    Raises `ConfigurationError` for options and policies that cannot work.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tenant: str | TenantOf | None,
        policies: Sequence[Policy] = (),
        known_tenants: Known | None = None,
        default_tenant: str | None = None,
        tenant_timeout: float = 10.0,
        cancel_on_disconnect: bool | ByScope | None = None,
        max_buffered_body: int = 256 * 1024,
        drain_timeout: float = 20.0,
        error_format: ErrorFormat | Callable[[Scope], ErrorFormat] = "problem",
        name: str = "asgi",
        telemetry: Telemetry | None = None,
    ) -> None:
        function(asynchronous=True, arguments=3, app=app)
        at_least(1, max_buffered_body=max_buffered_body)
        seconds(drain_timeout=drain_timeout, zero=True, infinite=True)
        seconds(tenant_timeout=tenant_timeout, infinite=True)
        if default_tenant is not None:
            label(default_tenant=default_tenant)
        if callable(cancel_on_disconnect):
            function(cancel_on_disconnect=cancel_on_disconnect)
        elif cancel_on_disconnect is not None:
            flag(cancel_on_disconnect=cancel_on_disconnect)
        if callable(error_format):
            function(error_format=error_format)
        elif not isinstance(error_format, str) or error_format not in FORMATS:
            allowed = ", ".join(map(repr, FORMATS))
            raise ConfigurationError(
                f"error_format={error_format!r}: allowed are {allowed}, or a function of the scope"
            )
        self.app = app
        self.pipeline = Pipeline(policies, self._run, door="asgi", name=name, telemetry=telemetry)
        self._tenants = Tenants(tenant, known=known_tenants, default=default_tenant, timeout=tenant_timeout)
        has_policies = bool(self.pipeline.policies)
        self._cancel = has_policies if cancel_on_disconnect is None else cancel_on_disconnect
        self._bare = not has_policies and not self._cancel
        self._max_buffered_body = max_buffered_body
        self._drain = Drain(drain_timeout)
        self._error_format = error_format
        self._rate_limit_headers = rate_limit_headers(self.pipeline.policies)
        self._target = Target(name=name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass on what is none."""
        if scope["type"] == "http" and not _is_preflight(scope):
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan" and not self._bare:
            warn_of_workers(self.pipeline.policies)
            try:
                await self.app(scope, self._drain.watch(receive), send)
            finally:
                self._drain.reopen()
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        cancel = _cancels(self._cancel, scope) if callable(self._cancel) else self._cancel
        call = self._call(scope)
        exchange = Exchange(
            call,
            scope,
            receive,
            send,
            cancel=cancel,
            max_buffered_body=self._max_buffered_body,
        )
        call.request.native = exchange
        call.sent = False
        try:
            self._drain.check()
            call.tenant = await self._tenants(scope)
        except RejectedError as error:
            call.telemetry.start(call)
            call.telemetry.rejected(call, error)
            await self._tell(exchange, error)
            return
        exchange.extra_headers = self._rate_limit_headers
        call.telemetry.start(call)
        if self._bare:
            with ambient(tenant=call.tenant):
                await self.app(scope, receive, send)
            return
        with self._drain.running():
            try:
                await exchange.carry(self.pipeline)
            except (RejectedError, DeadlineExceededError) as error:
                if not await self._tell(exchange, error):
                    raise

    def _call(self, scope: Scope) -> Call:
        inherited = current.get()
        return Call(
            Request(scope["method"], scope["path"], list(scope["headers"])),
            read=_read,
            target=self._target,
            loop=EventLoop.current() if self._bare else self.pipeline.loop(),
            telemetry=self.pipeline.telemetry.begin(),
            started=anyio.current_time(),
            deadline=inherited.effective_deadline(),
            priority=inherited.priority,
            inbound=True,
        )

    async def _run(self, call: Call) -> Reply:
        """Run the app: the innermost step of the pipeline."""
        exchange = cast("Exchange", call.request.native)
        return await exchange.run(self.app)

    async def _tell(self, exchange: Exchange, error: Refusal) -> bool:
        """Tell the client why it gets no answer, or no more of one; `False` when it is too late for that."""
        if exchange.disconnected:
            return True
        scope, chosen = exchange.scope, self._error_format
        error_format = _format_of(chosen, scope) if callable(chosen) else chosen
        with suppress(OSError):  # the client has left meanwhile
            if exchange.status is not None:
                late = isinstance(error, DeadlineExceededError)
                return late and await exchange.end_stream(error_event(error, error_format))
            for message in error_response(error, scope, error_format):
                await exchange.send(message)
        return True


def _cancels(asked: ByScope, scope: Scope) -> bool:
    try:
        return bool(asked(scope))
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the request
        hook_failed("cancel_on_disconnect", asked, error, instead="the request is cancelled, as by default")
        return True


def _format_of(asked: Callable[[Scope], ErrorFormat], scope: Scope) -> ErrorFormat:
    try:
        chosen = asked(scope)
    except Exception as error:  # noqa: BLE001 - whatever it is, the client is to be told what it asks for
        hook_failed("error_format", asked, error, instead=_AS_PROBLEM)
        return "problem"
    if isinstance(chosen, str) and chosen in FORMATS:
        return chosen
    hook_gave("error_format", asked, chosen, ", ".join(map(repr, FORMATS)), instead=_AS_PROBLEM)
    return "problem"


def _is_preflight(scope: Scope) -> bool:
    """Tell a browser's question whether it may ask, which never says for whom (the CORS protocol)."""
    if scope["method"] != "OPTIONS":
        return False
    return any(name == b"access-control-request-method" for name, _ in scope["headers"])


def _read(_request: Request) -> Profile:
    return _PROFILE
