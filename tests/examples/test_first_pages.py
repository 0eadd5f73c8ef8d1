"""The services on the pages that are read first do what these say."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from resilient_llm.testing import FakeProvider, Fault
from tests.pages import ROOT, examples

SERVICE, SDK = examples(ROOT / "README.md")
FOX = "The quick brown fox jumps over the lazy dog."


@pytest.fixture
def service(provider: FakeProvider) -> TestClient:
    app = SERVICE.run()["app"]
    assert isinstance(app, FastAPI)
    return TestClient(app)


def test_the_service_answers_and_retries(service: TestClient, provider: FakeProvider) -> None:
    provider.script("gpt-4o-mini", [Fault(status=429, headers={"retry-after-ms": "20"})])
    answer = service.post("/chat", params={"question": "?"}, headers={"x-tenant": "acme"})
    assert answer.json() == FOX
    assert provider.total_requests == 2


def test_the_service_wants_to_know_who_asks(service: TestClient) -> None:
    assert service.post("/chat", params={"question": "?"}).status_code == 401


def test_the_sdk_prints_what_it_streams(provider: FakeProvider, capsys: pytest.CaptureFixture[str]) -> None:
    SDK.run()
    assert capsys.readouterr().out == FOX
    assert [request.stream for request in provider.requests] == [True]


def test_a_client_from_the_middleware(provider: FakeProvider) -> None:
    [example] = [one for one in examples(ROOT / "docs" / "client.md") if "LLMMiddleware" in one.source]
    app = example.run()["app"]
    assert isinstance(app, FastAPI)
    provider.script("gpt-4o-mini", [Fault(status=429, headers={"retry-after-ms": "20"})])
    with TestClient(app) as client:
        assert client.post("/chat", params={"question": "?"}).json() == FOX
    assert provider.total_requests == 2
