"""One synthetic upstream at work: what is in flight and in service, and so what becomes of the next request.

What it is like is said by `Upstream`, what it has granted by `Quotas`, how replies look by `wording` and how they
arrive by `generation`.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import anyio
import httpx

from resilient_llm.lab.calendar import Calendar
from resilient_llm.lab.conditions import ANSWERED, BEGINS_WELL, FailureKind
from resilient_llm.lab.distributions import distribution
from resilient_llm.lab.generation import Body, Clock, Generation, silence
from resilient_llm.lab.quotas import Quotas
from resilient_llm.lab.visit import Visit
from resilient_llm.lab.wording import Asked, error_body, error_event, pieces, whole
from resilient_llm.message import Headers, Reply
from resilient_llm.streams import BufferedStream

if TYPE_CHECKING:
    from resilient_llm.lab.exchange import Exchange
    from resilient_llm.lab.upstream import Upstream

__all__ = ["Serving"]

_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_SERVER_ERROR = 500


class _Refusal(NamedTuple):
    """An error response in place of a reply."""

    failure: str
    """What the log calls it."""
    status: int
    headers: Headers
    code: str | None = None
    type: str | None = None
    message: str | None = None


class Serving:
    """Serve one `Upstream` in one simulation, which begins now.

    Whatever is left to chance is drawn from `rng`, in order of arrival. A client hears nothing for `read_timeout`
    seconds at most.
    """

    def __init__(self, upstream: Upstream, *, rng: Random, clock: Clock, read_timeout: float) -> None:
        self.in_flight = 0
        self.in_flight_max = 0
        self._clock = clock
        self._began = clock()
        self.upstream = upstream
        self.quotas = Quotas(upstream)
        self._rng = rng
        self._read_timeout = read_timeout
        self._serving = 0
        self._waiting: deque[anyio.Event] = deque()
        self._outages = Calendar(upstream.outages)
        self._phases = Calendar(upstream.phases)
        self._first_token = distribution(upstream.first_token)
        self._per_token = distribution(upstream.per_token)
        self._total = None if upstream.total is None else distribution(upstream.total)
        self._output_tokens = distribution(upstream.output_tokens)
        self._failure_latency = distribution(upstream.failure_latency)

    async def answer(self, asked: Asked, exchange: Exchange) -> Reply:
        """Answer one request. Raises httpx's exceptions where its connection fails."""
        visit = Visit(self, exchange)
        try:
            return await self._answer(asked, visit)
        except httpx.TransportError:
            visit.end(visit.failure)
            raise
        except BaseException:
            visit.end("abandoned")
            raise

    async def _answer(self, asked: Asked, visit: Visit) -> Reply:
        now = self.now()
        kind, retry_after = self._down(asked.key, now)
        kind = kind or self.quotas.turned_away(asked.key)
        if kind is not None:
            return await self._fail(asked, visit, kind, retry_after)
        tokens = self._length(asked)
        refusal = self._over_limits(asked, tokens, now) or await self._enter(visit)
        if refusal is not None:
            return await self._refuse(asked, visit, refusal)
        failure = self._chance()
        if failure is not None and failure not in BEGINS_WELL:
            return await self._fail(asked, visit, failure, None)
        return await self._reply(asked, visit, tokens, failure)

    async def _reply(self, asked: Asked, visit: Visit, tokens: int, failure: FailureKind | None) -> Reply:
        """Make a reply and hand it over, or what a failure makes of it."""
        generation = visit.generation = self._generate(tokens)
        visit.exchange.input_tokens = asked.prompt_tokens
        await generation.until(1)
        generation.slow_down(self._factor())
        if failure == "error_event" or (failure == "late_error_event" and not asked.stream):
            return await self._error_inside(asked, visit, generation, failure)
        if asked.stream:
            return self._stream(asked, visit, generation, failure)
        await generation.until(generation.tokens)
        text = whole(asked, generation.tokens)
        if failure is None:
            visit.end(None)
            return self._whole(asked, visit, 200, [_JSON], text)
        body = Body(
            generation,
            [(1, text[: len(text) // 2])],
            ended=visit.end,
            failure=failure,
            breaks_at=1,
            timeout=self._read_timeout if failure == "stall" else 0.0,
        )
        return self._open(asked, visit, _JSON, body)

    def _stream(
        self, asked: Asked, visit: Visit, generation: Generation, failure: FailureKind | None
    ) -> Reply:
        written = pieces(asked, generation.tokens, self.upstream.max_events)
        half = generation.tokens // 2
        late_error = failure == "late_error_event"
        body = Body(
            generation,
            written if failure is None else [piece for piece in written if piece[0] <= half],
            ended=visit.end,
            failure=failure,
            breaks_at=half,
            last_words=error_event(asked.dialect, _SERVER_ERROR) if late_error else b"",
            timeout=self._read_timeout if failure == "stall" else 0.0,
        )
        return self._open(asked, visit, _EVENTS, body)

    async def _error_inside(
        self, asked: Asked, visit: Visit, generation: Generation, failure: FailureKind
    ) -> Reply:
        """Answer 200 with an error in the body, where no content has been sent."""
        if failure == "late_error_event":
            await generation.until(generation.tokens)
        write = error_event if asked.stream else error_body
        visit.end(failure)
        kind = _EVENTS if asked.stream else _JSON
        return self._whole(asked, visit, 200, [kind], write(asked.dialect, _SERVER_ERROR))

    def _open(self, asked: Asked, visit: Visit, kind: tuple[bytes, bytes], body: Body) -> Reply:
        """Make a reply that is still on its way."""
        visit.exchange.status = 200
        return Reply(200, [kind, *self.quotas.headers(asked, self.now())], body, native=visit)

    async def _fail(self, asked: Asked, visit: Visit, kind: FailureKind, retry_after: float | None) -> Reply:
        """Fail before anything of a reply is there; a kind that begins well does so at its first token."""
        visit.failure = kind
        if kind in ANSWERED:
            told = [] if retry_after is None else [(b"retry-after", f"{retry_after:g}".encode())]
            code = kind if kind == "insufficient_quota" else None
            return await self._refuse(asked, visit, _Refusal(kind, ANSWERED[kind], told, code))
        if kind == "silence":
            await silence(self._read_timeout)
        if kind in BEGINS_WELL:
            return await self._reply(asked, visit, self._length(asked), kind)
        await anyio.sleep(self._failure_latency.draw(self._rng))
        if kind == "connect":
            raise httpx.ConnectError("all connection attempts failed")
        raise httpx.ReadError("connection reset by peer")

    async def _refuse(self, asked: Asked, visit: Visit, refusal: _Refusal) -> Reply:
        await anyio.sleep(self._failure_latency.draw(self._rng))
        body = error_body(asked.dialect, refusal.status, refusal.code, refusal.type, refusal.message)
        visit.end(refusal.failure)
        return self._whole(asked, visit, refusal.status, [_JSON, *refusal.headers], body)

    def _whole(self, asked: Asked, visit: Visit, status: int, headers: Headers, body: bytes) -> Reply:
        """Make a reply that is whole when it arrives."""
        visit.exchange.status = status
        headers = [*headers, *self.quotas.headers(asked, self.now())]
        return Reply(status, headers, BufferedStream([body]), native=visit, complete=True)

    def _down(self, key: str | None, now: float) -> tuple[FailureKind | None, float | None]:
        """Say how a request fails that comes now, if an outage makes it, and what it is told about coming back."""
        for outage in self._outages.at(now):
            if outage.key not in (None, key):
                continue
            if outage.share == 1 or self._rng.random() < outage.share:
                return outage.kind, outage.retry_after
        return None, None

    def _over_limits(self, asked: Asked, tokens: int, now: float) -> _Refusal | None:
        window = self.upstream.context_window
        if window is not None and asked.prompt_tokens + (asked.max_tokens or 1) > window:
            # Anthropic has no code for it; its clients know the message.
            message = f"prompt is too long: {asked.prompt_tokens} tokens > {window} maximum"
            return _Refusal("context_window", 400, [], code="context_length_exceeded", message=message)
        refused = self.quotas.take(asked, asked.prompt_tokens + tokens, now)
        if refused is None:
            return None
        fault = asked.dialect.refusal(asked.model, refused)
        headers = [(name.encode(), value.encode()) for name, value in fault.headers.items()]
        return _Refusal("rate_limit", 429, headers, fault.code, fault.type, fault.message)

    async def _enter(self, visit: Visit) -> _Refusal | None:
        """Take a place among those in service, or wait for one, or be refused."""
        capacity = self.upstream.capacity
        if capacity is not None:
            admission = capacity.admit(self._serving, len(self._waiting), self._limit(), self._rng)
            if admission == "refuse":
                return _Refusal("capacity", ANSWERED[capacity.refuse_with], [])
            if admission == "wait":
                await self._wait()
                visit.in_service = True
                return None
        self._serving += 1
        visit.in_service = True
        return None

    async def _wait(self) -> None:
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self.leave_service()
            else:
                self._waiting.remove(turn)
            raise

    def leave_service(self) -> None:
        """Give up a place; whoever has waited longest has it next, where the limit allows."""
        self._serving -= 1
        while self._waiting and self._serving + 1 <= max(1.0, self._limit()):
            self._serving += 1
            self._waiting.popleft().set()

    def _limit(self) -> float:
        limit = 1.0 if self.upstream.capacity is None else self.upstream.capacity.limit
        for phase in self._phases.at(self.now()):
            limit *= phase.capacity_factor
        return limit

    def _factor(self) -> float:
        """Give how much longer everything takes than with nothing else in service, in the present phases."""
        capacity = self.upstream.capacity
        factor = 1.0 if capacity is None else capacity.latency_factor(self._serving / self._limit())
        for phase in self._phases.at(self.now()):
            factor *= phase.latency_factor
        return factor

    def _generate(self, tokens: int) -> Generation:
        """Begin a reply; how fast its tokens come after the first is known when that is there."""
        first = self._first_token.draw(self._rng)
        per_token = self._per_token.draw(self._rng)
        if self._total is not None:
            total = self._total.draw(self._rng)
            first = min(first, total) if tokens > 1 else total
            per_token = (total - first) / max(1, tokens - 1)
        return Generation(tokens, self._clock, first * self._factor(), per_token)

    def _length(self, asked: Asked) -> int:
        tokens = max(1, round(self._output_tokens.draw(self._rng)))
        return tokens if asked.max_tokens is None else min(tokens, asked.max_tokens)

    def _chance(self) -> FailureKind | None:
        failures = self.upstream.failures
        if failures:
            draw = self._rng.random()
            for kind, ratio in failures.items():
                draw -= ratio
                if draw < 0:
                    return kind
        return None

    def now(self) -> float:
        """Give the seconds since the simulation began."""
        return self._clock() - self._began
