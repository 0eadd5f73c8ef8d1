"""uvicorn's protocol, and what it knows of a client while that is answered: whether it is still there, and takes more.

This is the `Connection` that the app asks. What may come from a client, and for how long, is looked at elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from resilient_llm.message import Headers
    from resilient_llm.outlet import Outlet
    from resilient_llm.sidecar.cycle import Cycle
    from resilient_llm.sidecar.rejection import Rejection

__all__ = ["WatchedProtocol"]


class WatchedProtocol(HttpToolsProtocol):
    """Tell whoever answers, and the app, of a client that leaves."""

    answered: Cycle | None = None
    """What is being answered, or was last; others may wait behind it."""
    rejection: Rejection | None = None
    """What the client was told in the place of the app's answer."""
    _left: Callable[[], None] | None = None
    _deaf = False
    """Whether nothing more is taken from the client."""
    _finishing = False
    """Whether the connection is to be closed, or is."""
    _gone = False
    _untaken = False
    """Whether it is gone, and has not taken what was sent."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell them, and let go of all that was asked: what refers to each other is freed late, or never."""
        if self.flow is not None and self.flow.write_paused:
            self._untaken = True
        self.tell()
        super().connection_lost(exc)
        self.pipeline.clear()
        self.cycle = self.answered = None  # type: ignore[assignment]  # as uvicorn has it before the first

    def finish(self) -> None:
        """Close the connection, once the client has taken the most of what was sent.

        TLS gives it little time from when it is told to close, whatever is still to be taken.
        """
        self._deaf = self._finishing = True
        if not self.flow.write_paused:
            self.transport.close()

    def resume_writing(self) -> None:
        """Go on sending, or do not."""
        super().resume_writing()
        if self._finishing:
            self.loop.call_soon(self.transport.close)  # asyncio would close twice

    def tell(self) -> None:
        """Tell whoever answers that there is nobody to answer to any more."""
        answered = self.answered
        if answered is not None and not answered.response_complete:  # uvicorn tells only the last in line
            answered.disconnected = True
            answered.message_event.set()
        self._gone = True
        left, self._left = self._left, None
        if left is not None:
            left()

    def has_whole_body(self) -> bool:
        """Tell whether the rest of the body is at hand of the request that is being answered."""
        answered = self.answered
        return answered is not None and not answered.more_body

    def watch(self, left: Callable[[], None]) -> None:
        """Read on from the client, and call `left` once when it is gone: at once if it is already."""
        if self._gone:
            left()
        else:
            self._left = left
            self.flow.resume_reading()  # which stops in the midst of a large body, and with it the news

    def unwatch(self) -> None:
        """Call nobody any more."""
        self._left = None

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole response, if nothing is in the way of it; tells whether it was."""
        return self.answered is not None and self.answered.answer(status, headers, body)

    def outlet(self) -> Outlet | None:
        """Give where parts of the body of a response can be put that has begun."""
        return self.answered

    def is_behind(self) -> bool:
        """Tell whether the client has still to take much of what was sent."""
        return self.flow.write_paused

    async def taken(self) -> bool:
        """Wait until it has, and tell so; not if it left before."""
        await self.flow.drain()
        return not self._untaken
