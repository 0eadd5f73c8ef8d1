"""What can go wrong between a request and its reply, for the transport that speaks HTTP itself.

`resilient_llm.providers.classify_exception` knows them by name. The exceptions of other libraries are theirs.
"""

from __future__ import annotations

__all__ = [
    "ConnectError",
    "ConnectTimeoutError",
    "InvalidURLError",
    "LocalProtocolError",
    "NetworkError",
    "ReadError",
    "ReadTimeoutError",
    "RemoteProtocolError",
    "TransportError",
    "UnsupportedProtocolError",
]


class TransportError(Exception):
    """A request was not answered, or not to the end."""


class ConnectError(TransportError):
    """There is no connection: an unknown host, a refusal, a certificate nobody vouches for. Nothing was sent."""


class ConnectTimeoutError(TransportError, TimeoutError):
    """There was no connection in time. Nothing was sent."""


class ReadError(TransportError):
    """The connection broke while a reply was awaited or read."""


class ReadTimeoutError(TransportError, TimeoutError):
    """A reply, or more of it, did not come in time."""


class RemoteProtocolError(TransportError):
    """What came is no reply, or was cut off."""


class NetworkError(TransportError):
    """The connection was closed on this side."""


class LocalProtocolError(TransportError, ValueError):
    """A request cannot be sent as it is."""


class InvalidURLError(TransportError, ValueError):
    """A URL is none, or names no host."""


class UnsupportedProtocolError(TransportError, ValueError):
    """A URL is neither `http` nor `https`."""
