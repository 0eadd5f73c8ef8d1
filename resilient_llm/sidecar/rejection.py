"""What clients are told by the server itself, before the app sees their request, or while it waits for the rest.

Each ends its connection. What the app refuses is told elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from httptools import HttpParserError, HttpParserInvalidURLError

from resilient_llm.sidecar.head import MalformedHeadError

__all__ = ["LATE", "MALFORMED", "TOO_LARGE", "TOO_MANY", "Rejection", "what_is_wrong"]


class Rejection(NamedTuple):
    """A status, with its phrase, and its name in the access log."""

    status: int
    phrase: str
    code: str

    def response(self, what: str) -> bytes:
        """Write the response that says what is wrong."""
        body = f"{what}\n".encode()
        head = f"HTTP/1.1 {self.status} {self.phrase}\r\nconnection: close\r\ncontent-type: text/plain\r\n"
        return b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


MALFORMED = Rejection(400, "Bad Request", "malformed_request")
LATE = Rejection(408, "Request Timeout", "request_timeout")
TOO_LARGE = Rejection(431, "Request Header Fields Too Large", "headers_too_large")
TOO_MANY = Rejection(503, "Service Unavailable", "too_many_connections")


def what_is_wrong(error: HttpParserError) -> str:
    """Say what the parser, or `check_head` in its midst, did not let pass; in it is nothing that was sent."""
    cause = error.__context__
    if isinstance(cause, HttpParserInvalidURLError):  # which has it in its words
        return "a target that is none"
    return str(cause if isinstance(cause, MalformedHeadError) else error)
