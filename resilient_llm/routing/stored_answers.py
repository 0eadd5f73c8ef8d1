"""Which target has made the answers that later requests go on from: OpenAI's stored responses and conversations.

A provider finds them by an id where they were made, and nowhere else. Where a request goes must not be decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from resilient_llm.core.ttl_cache import TTLCache

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import Request

__all__ = ["StoredAnswers"]

_MAX_SIZE = 16 * 1024 * 1024
"""Bytes: about 35,000 answers. Those asked for longest ago are forgotten first."""

_KEPT = 30 * 24 * 3600.0
"""Seconds; OpenAI keeps responses for 30 days."""

_IN_PATH = re.compile(r"/(?:responses|conversations)/([A-Za-z]+_[^/?#]+)")


class StoredAnswers:
    """Remember which target has made an answer, by the answer's id; in bounded memory, of this process only."""

    __slots__ = ("_targets",)

    def __init__(self) -> None:
        self._targets = TTLCache(_MAX_SIZE)

    def target_of(self, request: Request, now: float) -> str | None:
        """Give the name of the target that has what a request refers to; `None` where that is not known."""
        url = request.url
        if "/responses" not in url and "/conversations" not in url:
            return None
        found = (self._targets.get(name, now) for name in _referred_to(request))
        return next((name[0].decode() for name in found if name is not None), None)

    def keep(self, call: Call, target: str, now: float) -> None:
        """Remember that a target has answered an attempt."""
        request = call.request
        url = request.url
        if "/responses" not in url and "/conversations" not in url:
            return
        if request.json.get("store") is False:
            return
        for name in (call.answer_id, *_referred_to(request)):
            if name is not None:
                self._targets.put(name, target.encode(), now, _KEPT)


def _referred_to(request: Request) -> Iterator[str]:
    """Give the ids of stored things that a request names."""
    body = request.json
    conversation = body.get("conversation")
    named = conversation.get("id") if isinstance(conversation, dict) else conversation
    for name in (body.get("previous_response_id"), named):
        if isinstance(name, str) and name:
            yield name
    found = _IN_PATH.search(request.url)
    if found is not None:
        yield found[1]
