"""When a connection that is lost may be taken for one that the server had closed before the request came.

What was asked for over it may then be asked for once more, on another, by whoever can stand it being done twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_llm.providers import dialect_for

if TYPE_CHECKING:
    from resilient_llm.message import Request

__all__ = ["ROUND_TRIP", "may_be_done_twice", "was_closed_before"]

ROUND_TRIP = 1.0
"""Seconds in which word comes back from the other end of any network, a satellite's in between; mostly far fewer."""


def was_closed_before(*, uses: int, heard: bool, age: float) -> bool:
    """Tell so of one that has had so many requests, the last one `age` seconds ago; `heard` is a word in answer to it.

    RFC 9112, 9.3.1. A server that gives up in the midst of its work, which may be done all the same, will mostly have
    been at it for longer.
    """
    return uses > 1 and not heard and age < ROUND_TRIP


def may_be_done_twice(request: Request) -> bool:
    """Tell so of one that makes nothing which outlives its reply (RFC 9110, 9.2.2): of a completion, not of a batch."""
    return request.replayable and dialect_for(request).profile(request).repeat_safe
