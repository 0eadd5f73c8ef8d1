"""What a page leaves out because readers have it: a provider to talk to, and its keys."""

import pytest

from resilient_llm.testing import FakeProvider
from resilient_llm.transports.httpx_family import Family


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    """Answer, in memory, whatever is sent over a transport that nobody has chosen."""
    provider = FakeProvider()

    def transport(family: Family) -> object:
        return provider.httpx2_transport() if family.name == "httpx2" else provider.transport()

    monkeypatch.setattr(Family, "transport", transport)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    return provider
