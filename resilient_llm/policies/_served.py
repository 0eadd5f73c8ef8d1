"""A reply as it is kept, and as it is given again: what of its headers stays, and what is added.

Who gets it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, TypeAlias

from resilient_llm.core.stored_reply import StoredReply
from resilient_llm.message import Reply
from resilient_llm.streams import BufferedStream

if TYPE_CHECKING:
    from resilient_llm.message import Headers

__all__ = ["Served", "body_of", "lasting_headers", "served_reply", "told_headers"]

Served: TypeAlias = Literal["hit", "coalesced", "replay"]

_SERVED_HEADER = b"x-resilient-llm-cache"
_OF_THE_TRANSFER = frozenset(
    {
        b"age",
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-connection",
        b"set-cookie",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-should-retry",
        _SERVED_HEADER,
    }
)
"""Headers of one connection or one user."""
_OF_THE_MOMENT = (b"anthropic-ratelimit-", b"ratelimit", b"retry-after", b"x-ratelimit-")
"""What headers begin with that are no longer true when a reply is given again."""


def lasting_headers(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """Give the headers that stay true of a reply that is given again later."""
    return _without(headers, _OF_THE_TRANSFER, _OF_THE_MOMENT)


def told_headers(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """Give the headers that are true of a reply that is given to others at once."""
    return _without(headers, _OF_THE_TRANSFER)


async def body_of(reply: Reply) -> bytes | None:
    """Give the body of a reply that was read already; `None` where it cannot be read again."""
    if not reply.buffered:
        return None
    try:
        return b"".join([chunk async for chunk in reply.stream])
    except Exception:  # noqa: BLE001 - a library's own, for a stream that it has read itself
        return None


def _without(
    headers: Headers, names: Collection[bytes], beginnings: tuple[bytes, ...] = ()
) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(
        (name, value)
        for name, value in headers
        if name.lower() not in names and not name.lower().startswith(beginnings)
    )


def served_reply(stored: StoredReply, served: Served, age: float) -> Reply:
    """Make a reply of one that was kept, `age` seconds old."""
    headers = [
        *stored.headers,
        (b"content-length", str(len(stored.body)).encode()),
        (b"age", str(int(age)).encode()),
        (_SERVED_HEADER, served.encode()),
    ]
    return Reply(stored.status, headers, BufferedStream([stored.body]), complete=True)
