"""Exceptions of five libraries and of our own transport, made by hand and met on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import TypeAlias

import aiohttp
import anyio
import httpcore
import httpcore2
import httpx
import httpx2
import pytest

from resilient_llm.outcome import Outcome, Scope, Verdict
from resilient_llm.providers import classify_exception
from resilient_llm.transports import failures

NOT_SENT = ("connect_error", "connect_timeout", "proxy_error", "pool_timeout")
PERHAPS_SENT = (
    "read_error",
    "read_timeout",
    "write_error",
    "write_timeout",
    "close_error",
    "remote_protocol_error",
    "decoding_error",
    "timeout",
    "network_error",
    "transport_error",
)
IMPOSSIBLE = ("local_protocol_error", "unsupported_protocol", "invalid_url", "too_many_redirects")

HTTPX = {
    "ConnectError": "connect_error",
    "ConnectTimeout": "connect_timeout",
    "PoolTimeout": "pool_timeout",
    "ProxyError": "proxy_error",
    "ReadError": "read_error",
    "ReadTimeout": "read_timeout",
    "WriteError": "write_error",
    "WriteTimeout": "write_timeout",
    "CloseError": "close_error",
    "RemoteProtocolError": "remote_protocol_error",
    "DecodingError": "decoding_error",
    "TimeoutException": "timeout",
    "NetworkError": "network_error",
    "TransportError": "transport_error",
    "LocalProtocolError": "local_protocol_error",
    "UnsupportedProtocol": "unsupported_protocol",
    "InvalidURL": "invalid_url",
    "TooManyRedirects": "too_many_redirects",
}
AIOHTTP = {
    "ClientConnectorError": "connect_error",
    "ClientConnectorDNSError": "connect_error",
    "ClientConnectorSSLError": "connect_error",
    "ClientSSLError": "connect_error",
    "ClientConnectorCertificateError": "connect_error",
    "ServerFingerprintMismatch": "connect_error",
    "ConnectionTimeoutError": "connect_timeout",
    "ClientProxyConnectionError": "proxy_error",
    "ClientHttpProxyError": "proxy_error",
    "ClientConnectionResetError": "write_error",
    "ClientOSError": "read_error",
    "SocketTimeoutError": "read_timeout",
    "ServerTimeoutError": "timeout",
    "ServerDisconnectedError": "remote_protocol_error",
    "ClientPayloadError": "remote_protocol_error",
    "ClientResponseError": "remote_protocol_error",
    "ClientConnectionError": "network_error",
    "UploadAbortedError": "write_error",
    "ClientError": "transport_error",
    "InvalidURL": "invalid_url",
    "NonHttpUrlClientError": "unsupported_protocol",
    "TooManyRedirects": "too_many_redirects",
}

OURS = {
    "ConnectError": "connect_error",
    "ConnectTimeoutError": "connect_timeout",
    "ReadError": "read_error",
    "ReadTimeoutError": "read_timeout",
    "RemoteProtocolError": "remote_protocol_error",
    "NetworkError": "network_error",
    "TransportError": "transport_error",
    "LocalProtocolError": "local_protocol_error",
    "InvalidURLError": "invalid_url",
    "UnsupportedProtocolError": "unsupported_protocol",
}


def instance(library: ModuleType, name: str) -> BaseException:
    """Make an exception without the arguments its library would give it."""
    kind: type[BaseException] = getattr(library, name)
    return kind.__new__(kind)


def check(outcome: Outcome | None, error_type: str) -> None:
    assert outcome is not None
    assert outcome.error_type == error_type
    assert outcome.status is None
    if error_type in IMPOSSIBLE:
        assert (outcome.verdict, outcome.scope, outcome.retryable) == (Verdict.FATAL, Scope.REQUEST, False)
        return
    assert outcome.retryable
    assert outcome.ambiguous is (error_type in PERHAPS_SENT)
    if error_type == "pool_timeout":
        assert (outcome.verdict, outcome.scope) == (Verdict.NEUTRAL, Scope.LOCAL)
    else:
        assert (outcome.verdict, outcome.scope) == (Verdict.FAILURE, Scope.TARGET)


@pytest.mark.parametrize("name", HTTPX)
@pytest.mark.parametrize(
    "library", [httpx, httpx2, httpcore, httpcore2], ids=lambda library: library.__name__
)
def test_an_exception_of_the_httpx_family(library: ModuleType, name: str) -> None:
    if not hasattr(library, name):
        assert library in (httpcore, httpcore2)
        return
    check(classify_exception(instance(library, name)), HTTPX[name])


@pytest.mark.parametrize("name", AIOHTTP)
def test_an_exception_of_aiohttp(name: str) -> None:
    check(classify_exception(instance(aiohttp, name)), AIOHTTP[name])


@pytest.mark.parametrize("name", OURS)
def test_an_exception_of_our_own_transport(name: str) -> None:
    assert sorted(OURS) == sorted(failures.__all__)
    check(classify_exception(instance(failures, name)), OURS[name])


def test_every_type_has_one_kind() -> None:
    assert {*HTTPX.values(), *AIOHTTP.values()} == {*NOT_SENT, *PERHAPS_SENT, *IMPOSSIBLE}


@pytest.mark.parametrize("library", [httpx, httpx2], ids=lambda library: library.__name__)
def test_every_transport_error_of_the_httpx_family_is_known(library: ModuleType) -> None:
    for name in library.__all__:
        kind = getattr(library, name)
        if isinstance(kind, type) and issubclass(kind, library.TransportError):
            assert classify_exception(instance(library, name)) is not None, name


class OwnReadTimeout(httpx.ReadTimeout):
    """What an application may derive."""


class ReadTimeout(Exception):  # noqa: N818 - has the name of a library's, and is not one
    """Somebody else's."""


class Interrupt(httpx.ReadError, BaseException):
    """Still an Exception, and still what it is derived from."""


def test_derived_classes_are_what_they_are_derived_from() -> None:
    check(classify_exception(OwnReadTimeout("x")), "read_timeout")
    check(classify_exception(Interrupt("x")), "read_error")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a hook's"),
        TimeoutError(),
        OSError(),
        ConnectionResetError(),
        ReadTimeout(),
        httpx.HTTPStatusError("", request=httpx.Request("GET", "http://x"), response=httpx.Response(503)),
        httpx.StreamClosed(),
        httpx.CookieConflict(""),
        httpx2.RequestNotRead(),
        ExceptionGroup("", [httpx.ReadError("")]),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        SystemExit(),
        GeneratorExit(),
        BaseException(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_the_transports_is_not_judged(error: BaseException) -> None:
    assert classify_exception(error) is None


Get: TypeAlias = Callable[[str, float], Awaitable[object]]
"""Get a URL, and wait so many seconds for an answer."""


async def get_httpx(url: str, patience: float) -> object:
    async with httpx.AsyncClient(timeout=httpx.Timeout(60, read=patience), trust_env=False) as client:
        return await client.get(url)


async def get_httpx2(url: str, patience: float) -> object:
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(60, read=patience), trust_env=False) as client:
        return await client.get(url)


async def get_aiohttp(url: str, patience: float) -> object:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=patience)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
        return await response.read()


@asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[int]:
    """Answer each connection with some bytes and close it; with `None`, keep it open and say nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


@pytest.mark.anyio
@pytest.mark.realtime
@pytest.mark.parametrize("get", [get_httpx, get_httpx2, get_aiohttp])
@pytest.mark.parametrize(
    ("scheme", "answer", "error_type"),
    [
        ("https", b"this is no TLS", "connect_error"),
        ("http", b"", "remote_protocol_error"),
        ("http", b"no HTTP either\r\n\r\n", "remote_protocol_error"),
        ("http", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "remote_protocol_error"),
        ("http", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nha", "remote_protocol_error"),
        ("http", None, "read_timeout"),
    ],
)
async def test_a_failure_on_the_wire(get: Get, scheme: str, answer: bytes | None, error_type: str) -> None:
    async with server(answer) as port:
        with pytest.raises(Exception) as caught:
            await get(f"{scheme}://127.0.0.1:{port}/", 0.2 if answer is None else 60)
    check(classify_exception(caught.value), error_type)


@pytest.mark.anyio
@pytest.mark.realtime
@pytest.mark.parametrize("get", [get_httpx, get_httpx2, get_aiohttp])
async def test_nobody_listens(get: Get) -> None:
    async with server(b"") as port:
        pass
    with pytest.raises(Exception) as caught:
        await get(f"http://127.0.0.1:{port}/", 60)
    check(classify_exception(caught.value), "connect_error")


@pytest.mark.anyio
async def test_cancellation_is_nobodys_failure() -> None:
    judged: list[object] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            judged.append(classify_exception(error))
            raise
    assert judged == [None]
