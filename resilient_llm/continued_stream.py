"""A stream that broke, and the rest of it from one more attempt, as one stream to its caller.

Here attempts are joined, and the call is finished that they belong to. Whether a call may be gone on with is a
policy's to say, and how the two join a dialect's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from resilient_llm.call import outcome_of
from resilient_llm.errors import AttemptError
from resilient_llm.event_stream import EventStream
from resilient_llm.outcome import CANCELLED, Outcome, Usage
from resilient_llm.providers.continuation import continuation_for
from resilient_llm.source import abandon

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import Reply

__all__ = ["ContinuedStream"]


class ContinuedStream:
    """Relay the stream of a call's attempt; when that breaks, go on once with the stream of another.

    Only text can be gone on with: not the call of a tool, not several alternatives, not an answer that has come to
    its end. Nor is it after a refusal, which the same model would give again. When it cannot be, or the other
    attempt fails too, the caller is told why the first one broke. The call is finished with what both used.
    """

    def __init__(self, call: Call, stream: EventStream) -> None:
        stream.attempt.adopter = None  # the call goes on when this attempt is over
        self._call = call
        self._stream = stream
        self._continuation = continuation_for(call.request, max_event_size=call.streaming.max_event_size)
        self._broke: Outcome | None = None  # why the first stream broke
        self._resumed = False
        self._resuming: anyio.CancelScope | None = None
        self._over = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._over:
            try:
                data = await self._stream.__anext__()
            except AttemptError as error:
                if self._broke is None and await self._resume(error.outcome):
                    continue
                return await self._tell()
            except StopAsyncIteration:
                data = self._pass(b"\n\n") if self._resumed else b""  # for `[DONE]` without its blank line
                await self._end(self._stream.attempt.outcome or CANCELLED)
            except BaseException:
                outcome = self._stream.attempt.outcome
                if outcome is not None:  # a second reader, for one, is no end
                    await self._end(outcome)
                raise
            else:
                data = self._pass(data)
            if data:
                return data
        raise StopAsyncIteration

    def _pass(self, data: bytes) -> bytes:
        if self._continuation is None:
            return data
        if self._resumed:
            return self._continuation.join(data)
        self._continuation.listen(data)
        return data

    async def aclose(self) -> None:
        """Close the stream; before its end this abandons the call."""
        self._over = True
        resuming = self._resuming
        if resuming is not None:
            resuming.cancel()
        try:
            await self._stream.aclose()
        finally:
            outcome = CANCELLED if resuming is not None else self._stream.attempt.outcome
            await self._end(outcome or CANCELLED)

    async def _resume(self, broke: Outcome) -> bool:
        """Make the attempt that goes on; tell whether there is one."""
        self._broke = broke
        call, text = self._call, self._stream.text
        streaming = call.streaming
        if not (text and broke.retryable) or self._continuation is None or streaming.resume is None:
            return False
        call.broke = broke  # for whoever decides whether and when there is another attempt
        call.request = self._continuation.request(call.request, text, streaming.prefill or {})
        try:
            with call.loop.scope(deadline=call.deadline) as self._resuming:
                return await self._go_on_with(await streaming.resume(call))
        except AttemptError as error:
            if error.reply is not None:
                await abandon(error.reply.stream, None)
        except Exception:  # noqa: BLE001 - whatever it is, the caller is told of the first failure
            return False
        except BaseException as error:
            await self._end(outcome_of(error, call))
            raise
        finally:
            self._resuming = None
        return False

    async def _go_on_with(self, reply: Reply) -> bool:
        stream = reply.stream
        if self._over or not isinstance(stream, EventStream) or not stream.resumes:
            await abandon(stream, None)
            return False
        stream.attempt.adopter = None
        self._stream = stream
        self._resumed = True
        return True

    async def _tell(self) -> bytes:
        if self._over:  # another task has closed the stream meanwhile
            raise anyio.ClosedResourceError
        broke = self._broke or CANCELLED
        await self._end(broke)
        return self._stream.tell(broke)

    async def _end(self, outcome: Outcome) -> None:
        """Finish the call with what the attempts used together."""
        self._over = True
        if self._broke is not None:
            last = self._stream.attempt.outcome if self._resumed else None
            outcome = replace(outcome, usage=_sum(self._broke.usage, None if last is None else last.usage))
        await self._call.end(outcome)

    def __del__(self) -> None:
        # The last resort, as for the stream of an attempt.
        call = self._call
        if not call.finished:
            call.loop.post(lambda: call.finish_alone(CANCELLED))


def _sum(first: Usage | None, second: Usage | None) -> Usage | None:
    if first is None or second is None:
        return first or second
    counts = {
        name: _plus(getattr(first, name), getattr(second, name))
        for name in ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")
    }
    return Usage(**counts, estimated=first.estimated or second.estimated)


def _plus(first: int | None, second: int | None) -> int | None:
    return second if first is None else first + (second or 0)
