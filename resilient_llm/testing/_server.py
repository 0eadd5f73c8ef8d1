"""An ASGI app on a real socket, for as long as a test lasts. What runs it is uvicorn, imported on use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import anyio
from starlette.types import ASGIApp

if TYPE_CHECKING:
    from ._uvicorn import LoopbackServer

_JOIN_TIMEOUT = 10.0


@asynccontextmanager
async def serve(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` in this event loop and yield its base URL, without a final slash; port 0 is any free one.

    On leaving, open responses have one second to end. asyncio only: on trio use `serve_in_thread`. Raises
    RuntimeError when the app's startup fails, OSError when the port is taken, ImportError without uvicorn.
    """
    ready = asyncio.Event()
    server: LoopbackServer = _uvicorn().LoopbackServer(app, host, port, ready.set)
    task = asyncio.get_running_loop().create_task(server.run_to_end(), name=f"server of {server.base_url}")
    try:
        await ready.wait()
        if server.started:
            yield server.base_url
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await task


@contextmanager
def serve_in_thread(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve `app` in a thread with an event loop of its own and yield its base URL; otherwise as `serve`.

    A FakeProvider's log may be read from the test's thread, but its waits belong to the server's event loop.
    """
    ready = threading.Event()
    server: LoopbackServer = _uvicorn().LoopbackServer(app, host, port, ready.set)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.run_to_end())
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that started this one
            failures.append(failure)

    thread = threading.Thread(target=run, name=f"server of {server.base_url}", daemon=True)
    thread.start()
    try:
        ready.wait()
        if server.started:
            yield server.base_url
    finally:
        server.should_exit = True
        thread.join(_JOIN_TIMEOUT)
    if thread.is_alive():
        raise RuntimeError(f"the server of {server.base_url} did not stop within {_JOIN_TIMEOUT:g} s")
    if failures:
        raise failures[0]


def serve_forever(app: ASGIApp, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve `app` until the process is interrupted. Raises ImportError without uvicorn."""
    _uvicorn().run(app, host, port)


def _uvicorn() -> ModuleType:
    try:
        from . import _uvicorn as module  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("serving on a socket needs uvicorn: pip install 'resilient-llm[cli]'") from error
    return module
