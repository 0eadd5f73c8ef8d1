"""A reply as it is made, token by token in virtual time, and its body as it is handed to the client.

What goes wrong with it is decided in `serving`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import anyio
import httpx

from resilient_llm.lab.wording import Piece

__all__ = ["Body", "Clock", "Generation", "silence"]

Clock = Callable[[], float]
"""The event loop's clock, without asking each time which loop runs."""


class Generation:
    """Make `tokens` tokens, the first `first` seconds from now, each further one after `per_token` more."""

    __slots__ = ("_clock", "_first_at", "_per_token", "tokens")

    def __init__(self, tokens: int, clock: Clock, first: float, per_token: float) -> None:
        self.tokens = tokens
        self._clock = clock
        self._first_at = clock() + first
        self._per_token = per_token

    def slow_down(self, factor: float) -> None:
        """Make all tokens after the first take so much longer."""
        self._per_token *= factor

    async def until(self, tokens: int) -> None:
        """Wait until so many tokens are there."""
        wait = self._due(tokens) - self._clock()
        if wait > 0:
            await anyio.sleep(wait)

    def made(self) -> int:
        """Give how many tokens are there by now."""
        now = self._clock()
        if now >= self._due(self.tokens):
            return self.tokens
        if now < self._first_at:
            return 0
        return 1 + int((now - self._first_at) / self._per_token)

    def _due(self, tokens: int) -> float:
        return self._first_at + (tokens - 1) * self._per_token


class Body:
    """A reply's body on its way: each piece once its tokens are made, then the end.

    With a `failure` the end is a break instead, at the token `breaks_at`: `last_words`, or a lost connection, or
    silence for `timeout` seconds where there are none. `ended` is told how it ended, once: at the latest when the
    client closes it, and before the client can see the end, so that its next request finds the place free.
    """

    __slots__ = (
        "_breaks_at",
        "_ended",
        "_failure",
        "_generation",
        "_last_words",
        "_next",
        "_over",
        "_pieces",
        "_timeout",
    )

    def __init__(
        self,
        generation: Generation,
        pieces: Sequence[Piece],
        *,
        ended: Callable[[str | None], None],
        failure: str | None = None,
        breaks_at: int = 0,
        last_words: bytes = b"",
        timeout: float = 0.0,
    ) -> None:
        self._generation = generation
        self._pieces = pieces
        self._ended = ended
        self._failure = failure
        self._breaks_at = breaks_at
        self._last_words = last_words
        self._timeout = timeout
        self._next = 0
        self._over = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        try:
            return await self._read()
        except httpx.TransportError:
            self._end(self._failure)
            raise
        except BaseException:
            self._end("abandoned")
            raise

    async def _read(self) -> bytes:
        if self._next < len(self._pieces):
            tokens, piece = self._pieces[self._next]
            await self._generation.until(tokens)
            self._next += 1
            if self._failure is None and self._next == len(self._pieces):
                self._end(None)
            return piece
        await self._generation.until(self._breaks_at)
        if self._last_words:
            self._end(self._failure)
            return self._last_words
        if self._timeout:
            await silence(self._timeout)
        raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")

    async def aclose(self) -> None:
        """Stop; before the end the client has gone away."""
        self._end("abandoned")

    def _end(self, failure: str | None) -> None:
        if not self._over:
            self._over = True
            self._ended(failure)


async def silence(seconds: float) -> None:
    """Say nothing for the client's read timeout. Raises what its HTTP library would."""
    await anyio.sleep(seconds)
    raise httpx.ReadTimeout("the read operation timed out")
