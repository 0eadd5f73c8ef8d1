"""A deadline that has no scope of its own: it ends the call, and nothing of what is sent after that.

The scope in which a client's leaving ends a request serves the deadline, too, where the server says by itself that the
client has left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import anyio
import pytest

from resilient_llm.sidecar import Sidecar
from resilient_llm.sidecar.disconnect import EXTENSION
from resilient_llm.testing import FakeProvider, Fault
from tests.asgi.server import Connection
from tests.sidecar.support import ASK, OPEN, Watched, logged, memory
from tests.support import cancel_at_every_await

pytestmark = pytest.mark.anyio

SHORT = f"[server]\ndeadline = 5\n{OPEN}"
ONCE = f"{SHORT}[retry]\nenabled = false"
STREAMED = {**ASK, "stream": True}


class Telling(Watched, Connection):
    """A connection whose server says by itself when the client has left."""

    def __init__(self, body: object = ASK, *, seconds: float | None = None) -> None:
        headers = [] if seconds is None else [(b"x-request-timeout", str(seconds).encode())]
        super().__init__(
            json.dumps(body).encode(), method="POST", path="/v1/chat/completions", headers=headers
        )
        self.scope.update(query_string=b"", extensions={EXTENSION: self})

    def watch(self, left: Callable[[], None]) -> None:
        assert self.left is None
        if self.gone:
            left()
        else:
            self.left = left

    def disconnect(self) -> None:
        super().disconnect()
        left, self.left = self.left, None
        if left is not None:
            left()

    async def change_at(self, delay: float, change: Callable[[], None]) -> None:
        """Change something in a while."""
        await anyio.sleep(delay)
        change()

    def go_on(self) -> None:
        """Take what is sent, after all."""
        self.stalled = False
        self._notify()


def slow(toml: str = SHORT, fault: Fault = Fault(delay_headers=math.inf)) -> tuple[FakeProvider, Sidecar]:  # noqa: B008 - frozen
    provider = FakeProvider()
    provider.script(None, lambda _request: fault)
    return provider, memory(provider, toml)


@pytest.mark.parametrize("body", [ASK, STREAMED])
@pytest.mark.parametrize("seconds", [None, 2])
async def test_a_call_that_takes_too_long_is_answered(body: object, seconds: float | None) -> None:
    provider, sidecar = slow()
    earlier = Telling()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(earlier.run, sidecar)  # so that a shorter deadline is out of turn
        connection = await Telling(body, seconds=seconds).run(sidecar)
        assert (connection.status, connection.ended) == (504, seconds or 5)
        assert connection.json["error"]["code"] == "deadline_exceeded"
    assert (earlier.status, earlier.ended) == (504, 5)
    await anyio.sleep(1)
    assert all(request.disconnected_at is not None for request in provider.requests)
    assert sidecar.setup.running == 0


@pytest.mark.parametrize("seconds", [None, 2])
@pytest.mark.parametrize("fault", [Fault(delay_headers=math.inf), Fault()])
async def test_what_is_sent_may_take_longer(fault: Fault, seconds: float | None) -> None:
    _, sidecar = slow(fault=fault)
    connection = Telling(seconds=seconds)
    connection.stalled = True
    with logged() as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Telling().run, sidecar)
            tasks.start_soon(connection.change_at, 60, connection.go_on)
            await connection.run(sidecar)
    assert connection.ended == 60
    assert connection.complete
    assert not connection.left
    assert log.entries[-1]["outcome"] == ("ok" if connection.status == 200 else "error")


@pytest.mark.parametrize("fault", [Fault(delay_headers=math.inf), Fault()])
async def test_a_client_that_leaves_while_it_is_sent_the_answer_ends_that(fault: Fault) -> None:
    _, sidecar = slow(fault=fault)
    connection = Telling()
    connection.stalled = True
    with logged() as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.change_at, 60, connection.disconnect)
            await connection.run(sidecar)
    assert connection.ended == 60
    assert connection.sent == []
    assert log.entries[0]["status"] == (504 if fault.delay_headers else 200)
    assert sidecar.setup.running == 0


@pytest.mark.parametrize("fault", [Fault(delay_headers=math.inf), Fault(status=500)])
@pytest.mark.parametrize("body", [ASK, STREAMED])
@pytest.mark.parametrize("at", [0.0, 4.0, 5.0])
async def test_a_client_that_leaves_first_is_sent_nothing(body: object, fault: Fault, at: float) -> None:
    provider, sidecar = slow(fault=fault)
    connection = Telling(body)
    with logged() as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.change_at, at, connection.disconnect)
            await connection.run(sidecar)
    assert connection.ended is not None
    assert connection.ended <= 5
    assert connection.error is None
    assert (connection.status or 504) in (500, 504)
    assert log.entries[0]["outcome"] in ("cancelled", "error")
    await anyio.sleep(1)
    assert provider.requests[-1].disconnected_at is not None or fault.status
    assert sidecar.setup.running == 0


async def test_a_sidecar_that_is_stopped_at_the_very_deadline_says_so() -> None:
    _, sidecar = slow()
    connection = Telling()
    with logged() as log, anyio.move_on_after(5) as stopped:
        await connection.run(sidecar)
    assert stopped.cancelled_caught
    assert (connection.status, connection.complete) == (503, True)
    assert log.entries[0]["error"] == "shutting_down"


async def test_a_client_that_had_left_before_is_no_defect() -> None:
    _, sidecar = slow()
    connection = Telling()

    async def receive() -> dict[str, object]:
        message = await Connection.receive(connection)
        connection.disconnect()
        return dict(message)

    with logged() as log:
        await sidecar(connection.scope, receive, connection.send)
    assert log.entries[0]["outcome"] == "cancelled"
    assert connection.sent == []
    assert connection.now() == 0


async def test_a_stream_that_goes_on_is_cut_off_at_the_deadline_of_its_call() -> None:
    _, sidecar = slow(fault=Fault(token_delay=2.0))
    connection = await Telling(STREAMED).run(sidecar)
    assert connection.status == 200
    assert connection.ended == 5
    assert b"[DONE]" not in connection.body
    connection = await Telling(STREAMED, seconds=120).run(slow(OPEN, Fault(token_delay=2.0))[1])
    assert connection.error is None
    assert connection.body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_its_stream_ends_the_request_to_the_provider() -> None:
    provider, sidecar = slow(fault=Fault(stall_after_tokens=2))
    connection = Telling(STREAMED)
    with logged() as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.change_at, 3, connection.disconnect)
            await connection.run(sidecar)
    assert connection.ended == 3
    assert log.entries[0]["outcome"] == "cancelled"
    await anyio.sleep(1)
    assert provider.requests[-1].disconnected_at is not None


@pytest.mark.parametrize("fault", [Fault(delay_headers=math.inf), Fault(delay_headers=1), Fault(status=400)])
async def test_whoever_is_cancelled_at_any_await_leaves_nothing_behind(fault: Fault) -> None:
    provider, sidecar = slow(f"{SHORT}[bulkhead]\nmax_concurrent = 1", fault)
    connection = Telling()

    async def scenario() -> None:
        nonlocal connection
        connection = Telling()
        await sidecar(connection.scope, connection.receive, connection.send)

    async def check() -> None:
        assert sidecar.setup.running == 0
        assert connection.left is None
        after = Telling(seconds=60)
        provider.script(None, lambda _request: Fault())
        assert (await after.run(sidecar)).status == 200  # the only slot is free
        provider.script(None, lambda _request: fault)

    assert await cancel_at_every_await(scenario, check) >= 3


async def test_a_client_that_leaves_at_any_await_leaves_nothing_behind() -> None:
    for fault in (Fault(delay_headers=math.inf), Fault(delay_headers=1), Fault(status=400)):
        provider, sidecar = slow(f"{SHORT}[bulkhead]\nmax_concurrent = 1", fault)
        for asked in range(100):
            connection = Telling()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sidecar, connection.scope, connection.receive, connection.send)
                for _ in range(asked):
                    await anyio.lowlevel.checkpoint()
                connection.disconnect()
            assert sidecar.setup.running == 0
            assert connection.left is None
        provider.script(None, lambda _request: Fault())
        assert (await Telling().run(sidecar)).status == 200
