"""Give a field of a multipart form another value, and leave every other byte as it is (RFC 7578).

Forms are read by their boundaries only; files in them are not looked at.
"""

from __future__ import annotations

import re

__all__ = ["with_field"]

_BOUNDARY = re.compile(rb';[ \t]*boundary=(?:"([^"\r\n]{1,70})"|([^;\s"]{1,70}))', re.IGNORECASE)
_END_OF_HEAD = b"\r\n\r\n"


def with_field(form: bytes, content_type: bytes, name: str, value: bytes) -> bytes:
    """Give a form with `value` in its fields called `name`; the same form when it has none.

    `content_type` is the header that tells its boundary. Raises `ValueError` for what is no such form.
    """
    told = _BOUNDARY.search(content_type)
    if told is None:
        raise ValueError("a multipart form without a boundary")
    delimiter = b"--" + (told[1] or told[2])
    field = re.compile(rb';[ \t]*name="?%b"?[ \t]*(?:;|\r|$)' % re.escape(name.encode()), re.IGNORECASE)
    parts, kept = list[bytes](), 0
    at = 0 if form.startswith(delimiter) else form.find(b"\r\n" + delimiter) + 2
    if at < 2 and not form.startswith(delimiter):
        raise ValueError("a multipart form without its boundary")
    while not form.startswith(b"--", at + len(delimiter)):
        head = form.find(_END_OF_HEAD, at)
        start = head + len(_END_OF_HEAD)
        end = form.find(b"\r\n" + delimiter, start)
        if head < 0 or end < 0:
            raise ValueError("a multipart form that breaks off")
        if field.search(form, at, head) and b"filename" not in form[at:head].lower():
            parts += form[kept:start], value
            kept = end
        at = end + 2
    return b"".join([*parts, form[kept:]]) if parts else form
