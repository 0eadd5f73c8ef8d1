"""One reply played out in time, with what is to go wrong with it. Everything random has been drawn before."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

from ._dialect import Dialect, JSONObject, Reply, encode
from ._model import Latency
from ._request_log import ProviderRequest
from ._responder import Ending, Responder

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"


class Playback:
    """Play one request's answer to its client. Each wait is multiplied by `slowdown()` as it begins."""

    def __init__(
        self,
        responder: Responder,
        request: ProviderRequest,
        dialect: Dialect,
        reply: Reply,
        *,
        latency: Latency,
        slowdown: Callable[[], float],
    ) -> None:
        self._responder = responder
        self._request = request
        self._fault = request.fault
        self._dialect = dialect
        self._reply = reply
        self._latency = latency
        self._slowdown = slowdown

    async def play(self) -> Ending:
        """Send the response and say how it ends."""
        await self._sleep(self._latency.headers + self._fault.delay_headers)
        if self._fault.reset:
            return "reset"
        if self._fault.is_answer:
            status, content_type, body = plain_answer(self._request, self._dialect)
            await self._responder.answer(status, content_type, body)
            return None
        return await (self._stream() if self._request.stream else self._message())

    async def _stream(self) -> Ending:
        fault, reply = self._fault, self._reply
        await self._responder.start(200, _EVENTS)
        if fault.empty_stream:
            await self._responder.finish()
            return None
        for event in self._dialect.opening(reply):
            await self._responder.write(event)
        for index in range(len(reply.tokens)):
            if fault.interruption is not None and index >= fault.interruption:
                return await self._interrupt()
            await self._sleep(self._time_of(index), pinging=True)
            event = self._dialect.token(reply, index)
            await self._responder.write(_broken(event) if index == fault.malformed_event_at else event)
            self._request.tokens_sent += 1
        if fault.interruption is not None:
            return await self._interrupt()
        for event in self._dialect.closing(reply):
            await self._responder.write(event)
        if not fault.omit_done:
            await self._responder.write(self._dialect.terminal(reply))
        await self._responder.finish()
        return None

    async def _interrupt(self) -> Ending:
        """Interrupt a stream, in whichever way was chosen."""
        fault = self._fault
        if fault.reset_after_tokens is not None:
            return "reset"
        if fault.cut_after_tokens is not None:
            return "close"
        if fault.stall_after_tokens is not None:
            await self._sleep(math.inf, pinging=True)
        if fault.error_event_at is not None:
            await self._responder.write(
                self._dialect.error_event(_error(self._request, self._dialect), self._request.tokens_sent)
            )
        await self._responder.finish()
        return None

    async def _message(self) -> Ending:
        fault = self._fault
        await self._sleep(sum(map(self._time_of, range(len(self._reply.tokens)))))
        if fault.stall_after_tokens is not None:
            await anyio.sleep_forever()
        if fault.empty_stream:
            body = b""
        elif fault.error_event_at is not None:
            body = encode(_error(self._request, self._dialect))
        else:
            body = encode(self._dialect.message(self._reply))
            self._request.tokens_sent = len(self._reply.tokens)
        half = body[: len(body) // 2]
        if fault.reset_after_tokens is not None or fault.cut_after_tokens is not None:
            await self._responder.start(200, _JSON, len(body))
            await self._responder.write(half)
            return await self._interrupt()
        await self._responder.answer(200, _JSON, body if fault.malformed_event_at is None else half)
        return None

    def _time_of(self, index: int) -> float:
        if index == 0:
            return self._latency.first_token + self._fault.delay_first_token
        return self._latency.per_token + self._fault.token_delay

    async def _sleep(self, seconds: float, *, pinging: bool = False) -> None:
        if not seconds:
            return
        seconds *= self._slowdown()
        every = self._fault.ping_every if pinging else None
        while every is not None and seconds > every:
            await anyio.sleep(every)
            await self._responder.write(self._dialect.ping())
            seconds -= every
        await (anyio.sleep_forever() if seconds == math.inf else anyio.sleep(seconds))


def plain_answer(request: ProviderRequest, dialect: Dialect) -> tuple[int, str, bytes]:
    """Return the status, content type and body of an answer that is no reply."""
    fault = request.fault
    status = fault.status or 200
    if isinstance(fault.body, bytes):
        return status, "application/octet-stream", fault.body
    if isinstance(fault.body, str):
        return status, "text/plain; charset=utf-8", fault.body.encode()
    return status, _JSON, encode(_error(request, dialect))


def _error(request: ProviderRequest, dialect: Dialect) -> JSONObject:
    body = request.fault.body
    if body is None or isinstance(body, str | bytes):
        return dialect.error(request.fault, request.request_id)
    return body


def _broken(event: bytes) -> bytes:
    """Return the event with half of its JSON, still framed as an event."""
    head, mark, data = event.partition(b"data: ")
    return head + mark + data[: len(data) // 2] + b"\n\n"
