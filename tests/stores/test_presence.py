"""How many processes there are, by what a server that may begin anew says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import anyio
import pytest

from resilient_llm.stores._redis_presence import Presence
from resilient_llm.stores._redis_scripts import Reply, ScriptRunner

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)]


class Server:
    """Stand in for the runner: the test says when a batch goes, and what is answered."""

    def __init__(self) -> None:
        self.beat: Callable[[], None] = lambda: None
        self.heard: list[Callable[[Reply], None]] = []

    def while_used(self, _seconds: float, callback: Callable[[], None]) -> None:
        self.beat = callback

    def send(self, *_words: Any, heard: Callable[[Reply], None]) -> None:
        self.heard.append(heard)

    def counts(self, processes: int) -> None:
        """Have a batch go, and answer so."""
        self.beat()
        while self.heard:
            self.heard.pop()(processes)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def presence(server: Server) -> Presence:
    made = Presence(cast("ScriptRunner", server), "processes", "me")
    made.start()
    return made


async def test_those_that_began_together_are_counted_soon(server: Server, presence: Presence) -> None:
    server.counts(1)
    await anyio.sleep(0.3)
    server.counts(4)
    assert presence.processes == 4
    await anyio.sleep(0.3)
    server.beat()
    assert server.heard == [], "from then on every two seconds"


async def test_a_server_that_begins_anew_does_not_make_shares_larger(
    server: Server, presence: Presence
) -> None:
    server.counts(4)
    await anyio.sleep(2.0)
    for count in (1, 2, 3):
        server.counts(count)
        assert presence.processes == 4
        await anyio.sleep(2.0)
    server.counts(4)
    assert presence.processes == 4


async def test_a_second_outage_begins_with_what_was_known_before_the_first(
    server: Server, presence: Presence
) -> None:
    server.counts(4)
    await anyio.sleep(2.0)
    server.counts(1)
    await anyio.sleep(60.0)
    server.counts(1)
    assert presence.processes == 4


async def test_processes_that_have_ended_are_forgotten(server: Server, presence: Presence) -> None:
    server.counts(4)
    for _ in range(7):
        await anyio.sleep(2.0)
        server.counts(2)
    assert presence.processes == 2
