"""The fake provider: an ASGI app that speaks the APIs of LLM providers and fails as told.

It knows no provider's real behaviour beyond its APIs, and no policy of this library.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio
from starlette.types import Receive, Scope, Send

from ._admission import Admission
from ._anthropic import AnthropicMessages, anthropic_models
from ._connection import break_connection
from ._dialect import Dialect, Reply, count_prompt, encode, tokens_of
from ._fault import OK, Fault
from ._model import FakeModel
from ._openai import OpenAIChat, openai_models
from ._openai_embeddings import OpenAIEmbeddings
from ._openai_responses import OpenAIResponses
from ._playback import Playback, plain_answer
from ._rate_limits import RateLimits
from ._request_log import ProviderRequest, RequestLog
from ._responder import Ending, Responder
from ._script import Script, checked, steps
from .httpx import ASGIStreamTransport

if TYPE_CHECKING:
    from .httpx2 import ASGIStreamTransport as HTTPX2Transport

_DIALECTS: Final[Mapping[str, Dialect]] = {
    "/chat/completions": OpenAIChat(),
    "/responses": OpenAIResponses(),
    "/embeddings": OpenAIEmbeddings(),
    "/messages": AnthropicMessages(),
}


class FakeProvider:
    """Speak OpenAI's and Anthropic's APIs, streaming or not, and fail as scripted.

    It is an ASGI app: call it through `transport()` or `httpx2_transport()` in memory and in
    virtual time, or over a socket with `serve`. It answers `POST .../chat/completions`,
    `.../responses`, `.../embeddings` and `.../messages`, and `GET .../models`, under any prefix.

    - `model`: how every model behaves that is not in `models`; None: such models do not exist
      (404).
    - `models`: behaviour by name.
    - `account_limits`: rate limits over all models together, besides each model's own.
    - `api_keys`: the keys it accepts; any if None.
    - `tenant_header`: the request header whose value is logged as `tenant`.
    - `rng`: draws latencies; `random.Random(0)` unless given.
    - `wall_clock`: seconds since the epoch, for timestamps and reset instants in replies. All
      waiting is on anyio's.
    - `max_requests_kept`: how many requests `requests` holds at most; all if None.
    """

    def __init__(
        self,
        model: FakeModel | None = FakeModel(),  # noqa: B008 - immutable
        *,
        models: Mapping[str, FakeModel] | None = None,
        account_limits: RateLimits | None = None,
        api_keys: Collection[str] | None = None,
        tenant_header: str = "x-tenant",
        rng: random.Random | None = None,
        wall_clock: Callable[[], float] = time.time,  # noqa: TID251 - what other clients' wall clocks show
        max_requests_kept: int | None = None,
    ) -> None:
        if models is not None and not isinstance(models, Mapping):
            raise ValueError(f"models must be a mapping of names to FakeModel values, got {models!r}")
        if not isinstance(tenant_header, str):
            raise ValueError(f"tenant_header must be a string, got {tenant_header!r}")  # noqa: TRY004 - as all options
        self._models = dict(models or {})
        self._admission = Admission(model, self._models, account_limits=account_limits, api_keys=api_keys)
        self._tenant_header = tenant_header.lower()
        self._rng = rng or random.Random(0)
        self._wall_clock = wall_clock
        self._log = RequestLog(max_requests_kept)
        self._scripts: dict[str | None, Script] = {}

    # What it was told to do

    def script(self, model: str | None, faults: Iterable[Fault] | Script) -> None:
        """Choose the faults of a model's requests; with None, of every model that has no script of its own.

        `faults` are played one a request, in order, then no more; or a function of the request
        chooses each. Requests that the provider's limits refuse do not count. A new script replaces
        the old one; `[]` removes it. Raises TypeError for anything that is not a Fault: at once in
        a sequence, else when its turn comes.
        """
        self._scripts[model] = faults if callable(faults) else steps(faults)

    def transport(self) -> ASGIStreamTransport:
        """Return a new in-memory transport to this provider for an `httpx.AsyncClient`."""
        return ASGIStreamTransport(self)

    def httpx2_transport(self) -> HTTPX2Transport:
        """Return a new in-memory transport to this provider for an `httpx2.AsyncClient`."""
        try:
            from .httpx2 import ASGIStreamTransport as HTTPX2Transport  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ImportError("this transport needs httpx2: pip install 'resilient-llm[httpx2]'") from error
        return HTTPX2Transport(self)

    # What it saw

    @property
    def requests(self) -> list[ProviderRequest]:
        """The requests so far, in order of arrival."""
        return self._log.requests

    @property
    def total_requests(self) -> int:
        """How many requests have come, kept or not."""
        return self._log.total

    @property
    def active(self) -> int:
        """How many requests are in flight now."""
        return self._log.active

    @property
    def peak_active(self) -> int:
        """The most requests that were ever in flight at once."""
        return self._log.peak_active

    async def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests have come in all. In the provider's event loop only, as all waits."""
        await self._log.wait_until(lambda: self.total_requests >= count)

    async def wait_until_active(self, count: int) -> None:
        """Wait until at least so many requests are in flight."""
        await self._log.wait_until(lambda: self.active >= count)

    async def wait_until_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._log.wait_until(lambda: not self.active)

    # How it serves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        tenant = headers.get(self._tenant_header)
        request = self._log.open(method=scope["method"], path=scope["path"], headers=headers, tenant=tenant)
        ending: Ending = None
        try:
            if await _read_body(request, receive):
                ending = await self._answer(request, receive, send)
                if ending is not None:
                    self._end(request)
                    await break_connection(scope, receive, send, ending)
        finally:
            if not request.complete and ending is None:
                request.disconnected_at = anyio.current_time()
            self._end(request)

    def _end(self, request: ProviderRequest) -> None:
        # Before the client can see the end: its next request must find the place free.
        self._admission.leave(request)
        self._log.close(request)

    async def _answer(self, request: ProviderRequest, receive: Receive, send: Send) -> Ending:
        dialect = next((d for suffix, d in _DIALECTS.items() if request.path.endswith(suffix)), None)
        if dialect is None or request.method != "POST":
            await self._answer_directory(request, Responder(send, request, {}, self._end))
            return None
        now = anyio.current_time()
        reply = self._decide(request, dialect, now)
        headers = {dialect.request_id_header: request.request_id, **request.fault.headers}
        limits = dialect.rate_limit_headers(self._admission.levels(request, now), self._wall_clock())
        responder = Responder(send, request, {**limits, **headers}, self._end)
        if reply is None:
            status, content_type, body = plain_answer(request, dialect)
            await responder.answer(status, content_type, body)
            return None
        latency = self._admission.model(request.model).latency.draw(self._rng)
        playback = Playback(
            responder,
            request,
            dialect,
            reply,
            latency=latency,
            slowdown=lambda: self._admission.slowdown(request.model),
        )
        self._admission.enter(request)
        return await _unless_client_leaves(playback.play, receive)

    def _decide(self, request: ProviderRequest, dialect: Dialect, now: float) -> Reply | None:
        """Choose the request's fault and compose its reply; None if it is refused."""
        refusal = _understand(request, dialect) or self._admission.refuse_sender(request)
        if refusal is None:
            reply = self._compose(request, dialect)
            refusal = self._admission.refuse_load(request, dialect, len(reply.tokens), now)
            if refusal is None:
                script = self._scripts.get(request.model) or self._scripts.get(None)
                request.fault = OK if script is None else checked(script(request))
                return replace(reply, finish_reason=request.fault.finish_reason)
        request.fault = refusal
        return None

    def _compose(self, request: ProviderRequest, dialect: Dialect) -> Reply:
        text = self._admission.model(request.model).reply
        tokens = tokens_of(text if isinstance(text, str) else text(request))
        limit = dialect.max_tokens(request.body)
        return Reply(
            number=request.number,
            model=request.model,
            created=int(self._wall_clock()),
            tokens=tokens[:limit],
            prompt_tokens=request.prompt_tokens,
            truncated=limit is not None and len(tokens) > limit,
            finish_reason=None,
            request=request.body,
        )

    async def _answer_directory(self, request: ProviderRequest, responder: Responder) -> None:
        if request.method == "GET" and request.path.endswith("/models"):
            list_models = anthropic_models if "anthropic-version" in request.headers else openai_models
            await responder.answer(200, "application/json", encode(list_models(list(self._models))))
        else:
            known = any(request.path.endswith(suffix) for suffix in (*_DIALECTS, "/models"))
            message = f"Invalid URL ({request.method} {request.path})"
            body = OpenAIChat().error(
                Fault(status=405 if known else 404, message=message), request.request_id
            )
            await responder.answer(405 if known else 404, "application/json", encode(body))


async def _read_body(request: ProviderRequest, receive: Receive) -> bool:
    """Read the request's body; False when the client left before its end."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            request.raw_body = b"".join(parts)
            return True
    return False


def _understand(request: ProviderRequest, dialect: Dialect) -> Fault | None:
    """Fill in what the body asks for, or return the answer to one that asks for nothing."""
    try:
        body = json.loads(request.raw_body)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return Fault(status=400, message="We could not parse the JSON body of your request.")
    request.dialect = dialect.name
    request.body = body
    request.model = str(body.get("model", ""))
    request.stream = dialect.streams and body.get("stream") is True
    request.prompt_tokens = count_prompt(dialect.prompt(body))
    return None if request.model else Fault(status=400, message="you must provide a model parameter")


async def _unless_client_leaves(play: Callable[[], Awaitable[Ending]], receive: Receive) -> Ending:
    """Play on until the end or until the client goes away."""
    ending: Ending = None

    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        with contextlib.suppress(OSError):  # some servers raise it from `send` when the client has gone
            ending = await play()
        group.cancel_scope.cancel()
    return ending


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
