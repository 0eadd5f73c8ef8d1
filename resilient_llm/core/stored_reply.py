"""A whole reply as one string of bytes, to be kept somewhere and given again.

Here is only what it is made of and how that is written. Which replies are kept, where, and for how long is a policy's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["StoredReply"]

_HEAD = struct.Struct("!4sHdBHI")
"""Version, status, ttl (s), length of the fingerprint, number of headers, length of the body."""
_HEADER = struct.Struct("!HI")
_VERSION = b"RLR1"
_MAX_NAME = 0xFFFF
_MAX_HEADERS = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReply:
    """Hold a reply: its status, its raw headers, its body as it came, a stream's too.

    `ttl` is how long it was to be kept, in seconds, and `fingerprint` (at most 255 bytes) tells what it answers.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    ttl: float = 0.0
    fingerprint: bytes = b""

    def encode(self) -> bytes:
        """Write it as bytes. Raises `ValueError` for more headers than anybody sends."""
        if len(self.headers) > _MAX_HEADERS or any(len(name) > _MAX_NAME for name, _ in self.headers):
            raise ValueError("too many headers, or too long a name of one")
        parts = [
            _HEAD.pack(
                _VERSION, self.status, self.ttl, len(self.fingerprint), len(self.headers), len(self.body)
            ),
            self.fingerprint,
        ]
        for name, value in self.headers:
            parts += (_HEADER.pack(len(name), len(value)), name, value)
        parts.append(self.body)
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> StoredReply | None:
        """Read what `encode` wrote; `None` for bytes that another version wrote, or that are not whole."""
        try:
            version, status, ttl, fingerprint_size, count, body_size = _HEAD.unpack_from(data)
            if version != _VERSION:
                return None
            at = _HEAD.size + fingerprint_size
            fingerprint = data[_HEAD.size : at]
            headers = []
            for _ in range(count):
                name_size, value_size = _HEADER.unpack_from(data, at)
                at += _HEADER.size
                headers.append(
                    (data[at : at + name_size], data[at + name_size : at + name_size + value_size])
                )
                at += name_size + value_size
        except struct.error:
            return None
        if len(data) != at + body_size:
            return None
        return cls(status=status, headers=tuple(headers), body=data[at:], ttl=ttl, fingerprint=fingerprint)
