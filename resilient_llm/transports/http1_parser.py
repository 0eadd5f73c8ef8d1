"""The state of what a server says on one connection: bytes in, the parts of a reply out.

httptools finds heads, bodies and their ends and is strict about them; what it leaves to its caller is checked here. No
event loop and no socket is known here.
"""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from resilient_llm.message import Headers, header
from resilient_llm.transports.failures import RemoteProtocolError

__all__ = ["ReplyParser"]

_MAX_HEAD = 65_536
"""Bytes of a head, and of whatever else comes that is no body: the sizes of chunks, trailers, interim replies."""


class ReplyParser:
    """Take what comes on a connection, for one request after another.

    `status` is 0 until the head is there; `chunks` is what came of the body, for the reader to take and clear.
    `keep_alive` and `unasked` are to be asked once it is `complete`. `error` says why it is no reply.
    """

    __slots__ = (
        "_bodiless",
        "_fields",
        "_head",
        "_parser",
        "chunks",
        "complete",
        "error",
        "headers",
        "keep_alive",
        "on_body",
        "status",
        "unasked",
    )

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.on_body = self.chunks.append
        self.begin()
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def begin(self, *, bodiless: bool = False) -> None:
        """Expect a reply, without a body whatever its head says if it is `bodiless`."""
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self.keep_alive = False
        self.unasked = False
        self.error: RemoteProtocolError | None = None
        self._bodiless = bodiless
        self._fields: Headers = []
        self._head = 0

    def close(self) -> None:
        """Let go of httptools' parser, which holds this one."""
        self._parser = None

    def feed(self, data: bytes) -> None:
        """Take what came."""
        parser = self._parser
        assert parser is not None  # noqa: S101 - nothing comes after the connection is closed
        self._head += len(data)
        try:
            parser.feed_data(data)
        except HttpParserUpgrade:
            self.error = RemoteProtocolError("the server speaks another protocol from here on")
        except HttpParserError as error:
            if self.complete:
                self.unasked = True
            else:
                why = error.__context__ if isinstance(error.__context__, RemoteProtocolError) else error
                self.error = RemoteProtocolError(f"the reply is no HTTP: {why}")
        if self.chunks:
            self._head = 0
            if self._bodiless:
                self.chunks.clear()
        elif self._head > _MAX_HEAD and not self.complete:
            what = "what surrounds a body" if self.status else "a head"
            self.error = self.error or RemoteProtocolError(f"{what} has more than {_MAX_HEAD} bytes")

    def ends_with_connection(self) -> bool:
        """Tell whether the body is all that comes until the connection is closed (RFC 9112, 6.3)."""
        if not self.status or self.complete or self.error is not None:
            return False
        encoding = header(self.headers, b"transfer-encoding")
        return header(self.headers, b"content-length") is None and not (encoding and encoding.strip())

    def on_message_begin(self) -> None:
        """Take the first byte of a reply, unless it is one more than was asked for."""
        if self.complete:
            raise RemoteProtocolError("another reply was not asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer, which is dropped (RFC 9110, 6.5.1)."""
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Take a head; interim ones (RFC 9110, 15.2) are dropped."""
        parser = self._parser
        assert parser is not None  # noqa: S101 - it is what calls
        headers, self._fields = self._fields, []
        status = parser.get_status_code()
        if self._head > _MAX_HEAD and sum([len(n) + len(v) + 4 for n, v in headers]) > _MAX_HEAD:
            raise RemoteProtocolError(f"a head has more than {_MAX_HEAD} bytes")
        if status < 200:
            if status < 100 or status == 101:
                raise RemoteProtocolError(f"status {status} was not asked for")
            if header(headers, b"transfer-encoding") or header(headers, b"content-length") not in (
                None,
                b"0",
            ):
                raise RemoteProtocolError(f"status {status} with a body")
            return
        self.headers = headers
        encoding = header(headers, b"transfer-encoding")
        if encoding and (encoding := encoding.strip().lower()) not in (b"", b"chunked"):
            raise RemoteProtocolError(f"transfer-encoding {encoding!r} was not asked for")
        self.status = status
        self._head = 0
        if self._bodiless:
            self.complete = True  # httptools cannot be told, and may wait for a body
        else:
            # RFC 9112, 6.1: what HTTP/1.0 means by chunks is anybody's guess.
            self.keep_alive = parser.should_keep_alive() and not (
                encoding and parser.get_http_version() == "1.0"
            )

    def on_message_complete(self) -> None:
        """Take the end of a reply."""
        if self.status:
            self.complete = True
