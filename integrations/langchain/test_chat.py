"""The wiring of this folder against the fake provider, over real sockets: in this process, and through a sidecar."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from integrations.langchain.chat import (
    ATTEMPTS,
    MODEL,
    answer,
    in_process,
    main,
    make_client,
    stream,
    through_a_sidecar,
)
from resilient_llm.testing import OK, FakeProvider, Fault, serve
from tests.sidecar.support import over_sockets

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

FOX = "The quick brown fox jumps over the lazy dog."


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeProvider]:
    provider = FakeProvider()
    async with serve(provider) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield provider


async def test_the_program_answers(provider: FakeProvider, capsys: pytest.CaptureFixture[str]) -> None:
    await main("Tell me about the fox.")
    assert capsys.readouterr().out == f"in one piece: {FOX}\nas a stream: {FOX}\n"


async def test_failures_that_pass_are_not_seen(provider: FakeProvider) -> None:
    provider.script(MODEL, [Fault(status=429, headers={"retry-after-ms": "50"}), Fault(reset=True), OK] * 2)
    async with make_client(backoff=0.01) as client:
        llm = in_process(client)
        assert await answer(llm, "?") == FOX
        assert "".join([token async for token in stream(llm, "?")]) == FOX
    assert provider.total_requests == 6


async def test_one_layer_retries_and_errors_are_openais(provider: FakeProvider) -> None:
    provider.script(MODEL, lambda _request: Fault(status=503, message="down for maintenance"))
    async with make_client(backoff=0.01) as client:
        with pytest.raises(openai.InternalServerError, match="down for maintenance"):
            await answer(in_process(client), "?")
    assert provider.total_requests == ATTEMPTS


async def test_through_a_sidecar() -> None:
    provider = FakeProvider()
    provider.script(MODEL, [Fault(reset=True), OK, Fault(cut_after_tokens=0), OK])
    async with serve(provider) as upstream:
        toml = f"""
        [targets.openai]
        url = "{upstream}/v1"
        [retry]
        backoff = {{initial = 0.01}}
        """
        async with over_sockets(toml) as (url, _):
            llm = through_a_sidecar(url, "none")
            assert await answer(llm, "?") == FOX
            assert "".join([token async for token in stream(llm, "?")]) == FOX
            await llm.root_async_client.close()
    assert provider.total_requests == 4
