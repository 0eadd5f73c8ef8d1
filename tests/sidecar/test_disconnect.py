"""A client that leaves is noticed by the server's own word for it, without a task that waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from resilient_llm._loop import EventLoop
from resilient_llm.sidecar.disconnect import Connection, UnlessGone, connection_of, listening
from resilient_llm.sidecar.protocol import guarded
from tests.sidecar.support import Watched

pytestmark = pytest.mark.anyio


class Told(Watched):
    """A connection that says what the test says."""

    def __init__(self, *, gone: bool = False) -> None:
        self._gone = gone

    def watch(self, left: Callable[[], None]) -> None:
        self.left = left
        if self._gone:
            left()


def unless_gone(connection: Told, *, wanted: bool = True) -> UnlessGone:
    return UnlessGone(connection, lambda: wanted, EventLoop.current())


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("already", [True, False])
async def test_an_answer_is_broken_off_if_it_is_still_wanted(wanted: bool, already: bool) -> None:
    connection = Told(gone=already)
    done = False
    with unless_gone(connection, wanted=wanted) as scope:
        if connection.left is not None and not already:
            connection.left()
        await anyio.sleep(0.01)
        done = True
    assert done is not wanted
    assert scope.cancelled_caught is wanted
    assert connection.left is None


async def test_what_the_answer_raises_is_raised_and_nobody_is_called_any_more() -> None:
    connection = Told()
    with pytest.raises(KeyError, match="mine"), unless_gone(connection):
        raise KeyError("mine")
    assert connection.left is None


async def test_whoever_is_cancelled_otherwise_stays_so() -> None:
    connection = Told()
    with anyio.CancelScope() as outer:
        with unless_gone(connection) as inner:
            outer.cancel()
            await anyio.sleep(1)
        raise AssertionError("cancelled, and goes on")
    assert outer.cancelled_caught
    assert not inner.cancelled_caught
    assert connection.left is None


@pytest.mark.parametrize("wanted", [True, False])
async def test_elsewhere_a_task_listens(wanted: bool) -> None:
    done = False

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def answer() -> None:
        nonlocal done
        await anyio.sleep(0.01)
        done = True

    await listening(answer, lambda: wanted, receive)
    assert done is not wanted


async def test_what_is_raised_elsewhere_is_raised_as_it_is() -> None:
    async def answer() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await listening(answer, lambda: True, anyio.sleep_forever)  # type: ignore[arg-type]  # nothing comes


@asynccontextmanager
async def served(app: Callable[[Scope, Receive, Send], object]) -> AsyncIterator[int]:
    """Serve an app by the sidecar's own protocol; gives the port."""
    protocol = guarded(max_head=65_536, head_timeout=10.0)
    config = uvicorn.Config(app, port=0, http=protocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    with anyio.fail_after(10):
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await anyio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


@pytest.mark.realtime
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_server_says_whether_the_body_is_here_and_when_the_client_leaves() -> None:
    whole: list[bool] = []
    left = anyio.Event()

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        connection: Connection | None = connection_of(scope)
        assert connection is not None
        whole.append(connection.has_whole_body())
        message = await receive()
        while message["more_body"]:
            message = await receive()
        connection.watch(left.set)
        whole.append(connection.has_whole_body())
        await left.wait()

    async with served(app) as port:
        _reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 200000\r\n\r\n" + bytes(1))
        await writer.drain()
        with anyio.fail_after(10):
            while not whole:  # noqa: ASYNC110 - what is waited for tells nobody
                await anyio.sleep(0.005)
            writer.write(bytes(199_999))  # more than the server reads ahead
            while len(whole) < 2:  # noqa: ASYNC110 - what is waited for tells nobody
                await anyio.sleep(0.005)
            assert not left.is_set()
            writer.close()
            await left.wait()
    assert whole == [False, True]
