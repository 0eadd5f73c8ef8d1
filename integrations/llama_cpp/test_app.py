"""The service of this folder, against the fake provider instead of a model."""

from __future__ import annotations

from fastapi.testclient import TestClient

from integrations.llama_cpp.app import make_app
from resilient_llm.testing import FakeModel, FakeProvider, Fault


def test_it_answers_in_one_piece_and_as_a_stream() -> None:
    provider = FakeProvider(FakeModel(reply="Paris, of course."))
    provider.script(None, [Fault(status=503)])
    app = make_app("http://model.example/v1", provider.httpx2_transport())
    with TestClient(app, headers={"x-tenant": "acme"}) as client:
        assert client.get("/ask", params={"question": "?"}).json() == {"answer": "Paris, of course."}
        assert client.get("/stream", params={"question": "?"}).text == "Paris, of course."
    assert provider.total_requests == 3


def test_a_request_without_a_tenant_is_refused() -> None:
    with TestClient(make_app("http://model.example/v1")) as client:
        assert client.get("/ask", params={"question": "?"}).status_code == 401
