"""What the exceptions of HTTP libraries mean.

They are told by class name and by the package they come from, so none of these libraries is imported here.
Whatever is not known to be a failure of the transport is not ours to judge, cancellation least of all.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from resilient_llm.outcome import Outcome, Scope, Verdict

__all__ = ["classify_exception"]

_DEEP = 8
"""Causes of an exception that are looked at."""


def classify_exception(error: BaseException) -> Outcome | None:
    """Say what a transport's exception means; `None` when it is no known failure of a transport.

    Knows httpx, httpx2, httpcore, httpcore2, aiohttp and our own transport, and subclasses of their exceptions.
    `ambiguous` is set unless the exception shows that no request was sent.
    """
    if not isinstance(error, Exception):
        return None
    outcome = _classify(type(error))  # type: ignore[arg-type]  # mypy looks at the instances' __hash__
    if outcome is not None and outcome.error_type == "connect_error" and _is_out_of_files(error):
        return _OUT_OF_FILES  # a target would be blamed for what this process lacks
    return outcome


def _is_out_of_files(error: BaseException) -> bool:
    """Tell whether there was no descriptor for another socket."""
    cause: BaseException | None = error
    for _ in range(_DEEP):
        if cause is None:
            return False
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@lru_cache(maxsize=256)
def _classify(kind: type[BaseException]) -> Outcome | None:
    for ancestor in kind.__mro__:
        known = _LIBRARIES.get(ancestor.__module__.partition(".")[0])
        if known is not None and ancestor.__name__ in known:
            return known[ancestor.__name__]
    return None


def _not_sent(error_type: str) -> Outcome:
    return Outcome(verdict=Verdict.FAILURE, error_type=error_type, retryable=True)


def _perhaps_sent(error_type: str) -> Outcome:
    return Outcome(verdict=Verdict.FAILURE, error_type=error_type, retryable=True, ambiguous=True)


def _impossible(error_type: str) -> Outcome:
    return Outcome(verdict=Verdict.FATAL, scope=Scope.REQUEST, error_type=error_type)


_POOL_TIMEOUT = Outcome(verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type="pool_timeout", retryable=True)
"""All our own connections were taken: nothing was sent, and nothing is known of the target."""

_OUT_OF_FILES = replace(_POOL_TIMEOUT, error_type="too_many_open_files")
"""There was no descriptor for another one."""

_HTTPX: Mapping[str, Outcome] = {
    "ConnectError": _not_sent("connect_error"),  # refused, unreachable, unknown host, failed TLS handshake
    "ConnectTimeout": _not_sent("connect_timeout"),
    "PoolTimeout": _POOL_TIMEOUT,
    "ProxyError": _not_sent("proxy_error"),  # the proxy did not let us through to the target
    "ReadError": _perhaps_sent("read_error"),
    "ReadTimeout": _perhaps_sent("read_timeout"),
    "WriteError": _perhaps_sent("write_error"),
    "WriteTimeout": _perhaps_sent("write_timeout"),
    "CloseError": _perhaps_sent("close_error"),
    "RemoteProtocolError": _perhaps_sent("remote_protocol_error"),  # also a connection closed in mid-body
    "DecodingError": _perhaps_sent("decoding_error"),
    "TimeoutException": _perhaps_sent("timeout"),  # of a transport that says no more than that
    "NetworkError": _perhaps_sent("network_error"),
    "TransportError": _perhaps_sent("transport_error"),
    "LocalProtocolError": _impossible("local_protocol_error"),
    "UnsupportedProtocol": _impossible("unsupported_protocol"),
    "InvalidURL": _impossible("invalid_url"),
    "TooManyRedirects": _impossible("too_many_redirects"),
}

_AIOHTTP: Mapping[str, Outcome] = {
    "ClientConnectorError": _not_sent("connect_error"),  # with its kinds: DNS, TLS, certificate, Unix socket
    "ClientConnectorCertificateError": _not_sent("connect_error"),
    "ServerFingerprintMismatch": _not_sent("connect_error"),
    "ConnectionTimeoutError": _not_sent("connect_timeout"),
    "ClientProxyConnectionError": _not_sent("proxy_error"),
    "ClientHttpProxyError": _not_sent("proxy_error"),
    "ClientConnectionResetError": _perhaps_sent("write_error"),
    "ClientOSError": _perhaps_sent("read_error"),
    "SocketTimeoutError": _perhaps_sent("read_timeout"),
    "ServerTimeoutError": _perhaps_sent("timeout"),
    "ServerDisconnectedError": _perhaps_sent("remote_protocol_error"),
    "ClientPayloadError": _perhaps_sent("remote_protocol_error"),
    "ClientResponseError": _perhaps_sent("remote_protocol_error"),  # an answer that is not HTTP
    "ClientConnectionError": _perhaps_sent("network_error"),
    "UploadAbortedError": _perhaps_sent("write_error"),
    "ClientError": _perhaps_sent("transport_error"),
    "InvalidURL": _impossible("invalid_url"),
    "NonHttpUrlClientError": _impossible("unsupported_protocol"),
    "TooManyRedirects": _impossible("too_many_redirects"),
}

_OURS: Mapping[str, Outcome] = {
    "ConnectError": _not_sent("connect_error"),
    "ConnectTimeoutError": _not_sent("connect_timeout"),
    "ReadError": _perhaps_sent("read_error"),
    "ReadTimeoutError": _perhaps_sent("read_timeout"),
    "RemoteProtocolError": _perhaps_sent("remote_protocol_error"),
    "NetworkError": _perhaps_sent("network_error"),
    "TransportError": _perhaps_sent("transport_error"),
    "LocalProtocolError": _impossible("local_protocol_error"),  # also of the transport over aiohttp
    "InvalidURLError": _impossible("invalid_url"),
    "UnsupportedProtocolError": _impossible("unsupported_protocol"),
}
"""Of `resilient_llm.transports.failures`."""

_LIBRARIES: Mapping[str, Mapping[str, Outcome]] = {
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "httpcore": _HTTPX,
    "httpcore2": _HTTPX,
    "aiohttp": _AIOHTTP,
    "resilient_llm": _OURS,
}
