"""Why a request is not carried on, and how that is told: as the API that was called tells errors.

Sentences are fixed, but for names that the caller gave; nothing of an exception, a key or a configuration is in them.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache

from starlette.types import Message

from resilient_llm.message import NO_RETRY, Headers
from resilient_llm.providers import ANTHROPIC, OPENAI

__all__ = ["RefusedError", "dated", "plain", "refusal"]


class RefusedError(Exception):
    """A request that is answered with an error, before any policy sees it."""

    def __init__(self, status: int, code: str, message: str, headers: Headers | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or []


def refusal(error: RefusedError, path: str, method: str, more: Headers) -> tuple[Message, Message]:
    """Make the messages of the response."""
    dialect = ANTHROPIC if path.startswith("/v1/messages") else OPENAI
    body = dialect.error_body(error.status, str(error), code=error.code)
    headers = [(b"content-type", b"application/json"), NO_RETRY, *error.headers, *more]
    return plain(error.status, body, headers, method)


def plain(status: int, body: bytes, headers: Headers, method: str = "GET") -> tuple[Message, Message]:
    """Make the messages of a response of this side's own."""
    sized: Headers = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
    return (
        {"type": "http.response.start", "status": status, "headers": [*headers, *sized, dated()]},
        {"type": "http.response.body", "body": b"" if method == "HEAD" else body},
    )


def dated() -> tuple[bytes, bytes]:
    """Give the header that whoever makes a response dates it with (RFC 9110, 6.6.1)."""
    return b"date", _to_the_second(int(time.time()))  # noqa: TID251 - the wall clock, as of every date


@lru_cache(maxsize=4)
def _to_the_second(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
