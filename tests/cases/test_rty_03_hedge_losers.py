"""RTY-03: the loser of a hedge is closed, recorded on its own, and counted neither for nor against anybody."""

from __future__ import annotations

import anyio
import pytest

from resilient_llm import Bulkhead, CircuitBreaker, CircuitState, Hedge, RateLimit, Retry
from resilient_llm.testing import OK, FakeModel, FakeProvider, Fault, Latency
from tests.policies.hedging import Attempts, InTurn
from tests.signals import Recording
from tests.telemetry.observed import STREAM, URL, ask, client_of, outcomes

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "not streamed"])
@pytest.mark.parametrize(
    "slow",
    [
        Fault(delay_headers=6.0),
        Fault(delay_headers=6.0, status=500),
        Fault(delay_first_token=6.0, ping_every=1.0),
    ],
    ids=["answers later", "fails later", "only pings"],
)
async def test_one_response_two_attempts_and_nothing_left(slow: Fault, streamed: bool) -> None:
    recording = Recording()
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.5), reply="one two"))
    provider.script("gpt-4o", [slow, OK])
    circuit = CircuitBreaker(consecutive_failures=1, key="target")
    slots = Bulkhead(max_concurrent=1, key="target")
    attempts = Attempts()
    policies = (Retry(), Hedge(delay=2.0), InTurn(), slots, circuit, attempts)
    async with client_of(recording, provider, *policies) as client:
        began = anyio.current_time()
        if streamed:
            async with client.stream("POST", URL, json=STREAM) as response:
                assert (provider.active, slots.in_use()) == (1, 1)  # the loser's connection is closed already
                await response.aread()
        else:
            response = await ask(client)
        assert anyio.current_time() - began == pytest.approx(2.5, abs=0.1)
        assert response.status_code == 200
        await anyio.sleep(10)  # whatever the loser would still have said

    assert provider.total_requests == 2
    loser, winner = provider.requests
    assert loser.disconnected_at is not None
    assert loser.disconnected_at - began == pytest.approx(2.5, abs=0.1)
    assert winner.complete
    assert (provider.active, slots.in_use(), attempts.held) == (0, 0, 0)
    assert [circuit.state(name) for name in ("one", "two")] == [CircuitState.CLOSED] * 2

    spans = recording.spans
    call = spans.one("chat")
    first, second = spans.named("attempt")
    assert outcomes([first, second]) == ["cancelled", "success"]
    assert "gen_ai.usage.input_tokens" not in first.attributes
    assert call.attributes["resilient_llm.outcome"] == "success"
    if not streamed:  # of the one that was answered with, not of both
        assert call.attributes["gen_ai.usage.input_tokens"] == winner.prompt_tokens
    assert recording.open == 0


async def test_what_a_limit_set_aside_for_the_loser_is_kept_as_an_estimate() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.5), reply="one two"))
    provider.script("gpt-4o", [Fault(delay_headers=6.0), OK])
    limit = RateLimit(tokens_per_minute=1200, key="target")
    attempts = Attempts()
    async with client_of(
        Recording(), provider, Retry(), Hedge(delay=2.0), InTurn(), limit, attempts
    ) as client:
        await ask(client)
        loser, winner = (1200 - limit.levels(attempt)[0].remaining for attempt in attempts.made)
    assert provider.requests[0].disconnected
    # The provider may well have made all of it, and bills that; of the other it is known what it was.
    assert loser > 400
    assert winner < 50
