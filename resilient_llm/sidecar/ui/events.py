"""The stream of what the page shows: server-sent events, each of which is everything there is to see.

Whoever connects anew has missed nothing, so there is nothing to be remembered of anybody. Who may connect is the
page's to say.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import anyio
from starlette.types import Receive, Send

from resilient_llm.message import Headers
from resilient_llm.sidecar.exchange import CutShortError
from resilient_llm.sidecar.ui.snapshot import NothingToSeeError
from resilient_llm.sidecar.ui.view import Query, view

if TYPE_CHECKING:
    from resilient_llm.sidecar.ui.live import Live

__all__ = ["Events"]

logger = logging.getLogger("resilient_llm")

_PATIENCE = 10.0
"""Seconds that a viewer may take to take what it is sent."""


class Events:
    """Send viewers, once a period, what they look for in the snapshots of `live`."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._written: dict[Query, bytes] = {}
        self._written_of = 0

    async def send_to(
        self, receive: Receive, send: Send, *, query: Query, remaining: float, headers: Headers
    ) -> None:
        """Do so until the viewer leaves, `remaining` seconds are over, or nothing more will come.

        Raises `CutShortError` for a viewer that takes nothing, and `TooManyViewersError`.
        """
        too_slow = False
        with self._live.viewing():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                too_slow = await self._send_all(send, query, anyio.current_time() + remaining, headers)
                tasks.cancel_scope.cancel()
        if too_slow:
            logger.info("a viewer of the admin page was too slow, and is left")
            raise CutShortError  # a response that is not taken cannot be ended otherwise

    async def _send_all(self, send: Send, query: Query, end: float, headers: Headers) -> bool:
        """Send everything, and tell whether the viewer was too slow for it."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        number, last = 0, False
        while not last:
            number += 1
            name, data, wait = await self._next(query, end)
            last = wait is None
            event = b"event: %s\nid: %d\ndata: %s\n\n" % (name, number, data) if name else b""
            with anyio.move_on_after(_PATIENCE) as patience:
                await send({"type": "http.response.body", "body": event, "more_body": not last})
            if patience.cancelled_caught:
                return True
            await anyio.sleep(wait or 0.0)
        return False

    async def _next(self, query: Query, end: float) -> tuple[bytes, bytes, float | None]:
        """Give the name and the data of the next event, and the seconds to wait after it; `None` if it is the last."""
        if anyio.current_time() >= end:
            return b"expired", b"{}", None
        try:
            snapshot = await self._live.latest()
        except NothingToSeeError:
            return b"", b"", None
        if self._written_of != self._live.number:
            self._written_of = self._live.number
            self._written.clear()
        written = self._written.get(query)
        if written is None:  # others that look for the same get the same
            written = json.dumps(view(snapshot, query), allow_nan=False, separators=(",", ":")).encode()
            self._written[query] = written
        if not snapshot["draining"]:
            return b"state", written, self._live.period
        # A server that stops waits for the streams it has.
        return b"state", written, self._live.period / 5 if snapshot["running"] else None


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
