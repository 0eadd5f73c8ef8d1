"""Parsing JSON that has come in bytes, as nearly all requests and replies do.

What `json.loads` gives, without what it does for documents that hardly exist. What a document says must not enter here.
"""

from __future__ import annotations

import json

__all__ = ["parse_json"]

_PLAIN = (b'{"', b"{\n", b"{ ")
"""How a document begins that can be in UTF-8 only: in the other encodings of JSON one of the two is a zero."""

_SPACE = " \t\n\r"
_raw_decode = json.JSONDecoder().raw_decode


def parse_json(document: bytes) -> object:
    """Parse a document in any encoding that JSON may have.

    Raises `ValueError` for what is none, and `RecursionError` for one that is nested too deeply.
    """
    if document.startswith(_PLAIN):
        # `json.loads` would first guess the encoding, and look for space at both ends: a third of the time.
        text = document.decode("utf-8", "surrogatepass")
        parsed, end = _raw_decode(text)
        if end == len(text) or not text[end:].strip(_SPACE):
            return parsed
    return json.loads(document)
