"""What is left of a call that has failed: nothing that only the garbage collector would find."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from weakref import ref

import pytest

from resilient_llm import Call, CallNext, Deadline, Reply, Request, Retry
from resilient_llm.client import ClientDoor
from resilient_llm.message import Headers
from resilient_llm.streams import BufferedStream, LibraryErrors

pytestmark = pytest.mark.anyio


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def made(status: int, headers: Headers, body: bytes) -> Reply:
    return Reply(status, headers, BufferedStream([body]), native=body, complete=True)


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("statuses", [[200], [400], [401], [503, 503], [503, 200]])
@pytest.mark.parametrize("retries", [True, False])
async def test_a_failed_call_is_not_left_to_the_garbage_collector(
    statuses: list[int], retries: bool, anyio_backend_name: str
) -> None:
    calls: list[ref[Call]] = []
    script = statuses if retries else statuses[:1]
    if len(script) > 1 and anyio_backend_name == "trio" and sys.version_info[:2] == (3, 13):
        pytest.skip("there whoever has slept by trio.sleep is left to it")
    answers = iter(script)

    async def transport(_request: Request) -> Reply:
        return made(
            next(answers), [(b"content-type", b"application/json")], b'{"choices": [{"text": "yes"}]}'
        )

    async def note(call: Call, call_next: CallNext) -> Reply:
        calls.append(ref(call))
        return await call_next(call)

    door = ClientDoor(
        transport,
        synthesise=made,
        errors=LibraryErrors(timed_out=TimeoutError, broken=ConnectionError),
        policies=[Deadline(60), note, *([Retry(max_attempts=2)] if retries else [])],
    )
    request = Request("POST", "http://h/v1/completions", [], b'{"model": "m", "prompt": "Well?"}')
    assert (await door.handle(request)).status == script[-1]
    assert [call() for call in calls] == [None]
