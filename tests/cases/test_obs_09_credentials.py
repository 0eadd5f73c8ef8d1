"""OBS-09, as far as there is one target: what a client sent to the service does not go on to the provider."""

from __future__ import annotations

import pytest

from resilient_llm.testing import FakeProvider, Fault
from tests.signals import Recording
from tests.telemetry.observed import ask, client_of
from tests.telemetry.service import Service

pytestmark = pytest.mark.anyio

INBOUND = {
    "authorization": "Bearer CANARY-1",
    "x-api-key": "CANARY-2",
    "cookie": "session=CANARY-3",
    "baggage": "user=CANARY-4",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}


async def test_nothing_of_an_inbound_request_but_its_trace_reaches_the_provider() -> None:
    provider = FakeProvider()
    service = Service(provider, instrument="fastapi")
    async with service.client() as client:
        assert (await client.post("/v1/chat", headers=INBOUND)).status_code == 200
    (request,) = provider.requests
    assert "CANARY" not in str(dict(request.headers))
    assert "x-tenant" not in request.headers
    assert request.headers["traceparent"].split("-")[1] == INBOUND["traceparent"].split("-")[1]
    for span in service.recording.spans:
        assert "CANARY" not in str(dict(span.attributes))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=status, headers={"location": "http://elsewhere.example/"})])
    recording = Recording()
    async with client_of(recording, provider) as client:
        assert (await ask(client)).status_code == status
    assert provider.total_requests == 1
    assert recording.spans.one("attempt").attributes["http.response.status_code"] == status
