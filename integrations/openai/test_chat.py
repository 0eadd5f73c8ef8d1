"""The wiring of this folder against the fake provider, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from integrations.openai.chat import ATTEMPTS, MODEL, answer, main, make_client, stream
from resilient_llm.testing import OK, FakeProvider, Fault, serve

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
        assert await answer(client, "?") == FOX
        assert "".join([token async for token in stream(client, "?")]) == FOX
    assert provider.total_requests == 6


@pytest.mark.parametrize("max_retries", [0, 2], ids=["max_retries=0", "the SDK's default"])
async def test_one_layer_retries(provider: FakeProvider, max_retries: int) -> None:
    provider.script(MODEL, lambda _request: Fault(status=503, message="down for maintenance"))
    async with make_client(backoff=0.01, max_retries=max_retries) as client:
        with pytest.raises(openai.InternalServerError, match="down for maintenance") as raised:
            await answer(client, "?")
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert provider.total_requests == ATTEMPTS


async def test_an_open_circuit_is_the_sdks_own_error_and_costs_no_request(provider: FakeProvider) -> None:
    provider.script(MODEL, lambda _request: Fault(status=500))
    async with make_client(backoff=0.01) as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as raised:
                await answer(client, "?")
        sent = provider.total_requests
        with pytest.raises(openai.InternalServerError) as raised:
            await answer(client, "?")
    assert (raised.value.status_code, raised.value.code) == (503, "circuit_open")
    assert int(raised.value.response.headers["retry-after"]) >= 1
    assert provider.total_requests == sent == 5  # as many failures in a row open it
