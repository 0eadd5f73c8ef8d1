"""What the table says of the SDKs that are here is so: where the URL goes, and how many retries there are."""

from __future__ import annotations

import anthropic
import openai
import pytest
from google.genai.types import HttpOptions

from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.pages import ROOT

PAGE = (ROOT / "integrations" / "other_clients" / "README.md").read_text()
HELLO = [{"role": "user", "content": "hi"}]


def row(name: str) -> str:
    [found] = [line for line in PAGE.splitlines() if line.startswith(f"| {name}")]
    return found


def test_the_defaults_are_as_said() -> None:
    assert "2 by default" in row("OpenAI, Python")
    assert openai.DEFAULT_MAX_RETRIES == 2
    assert "2 by default" in row("Anthropic, Python")
    assert anthropic.DEFAULT_MAX_RETRIES == 2
    assert "none unless" in row("Google Gen AI")
    assert HttpOptions().retry_options is None


@pytest.mark.realtime
def test_the_variables_are_read_and_the_paths_are_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = FakeProvider()
    with serve_in_thread(provider) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
        with openai.OpenAI(api_key="none") as one:
            one.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
        with anthropic.Anthropic(api_key="none") as other:
            other.messages.create(model="m", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
    assert [request.path for request in provider.requests] == ["/v1/chat/completions", "/v1/messages"]
    assert "`OPENAI_BASE_URL`" in row("OpenAI, Python")
    assert "`ANTHROPIC_BASE_URL`" in row("Anthropic, Python")


@pytest.mark.realtime
def test_a_header_keeps_their_retries_from_multiplying() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(status=503, headers={"x-should-retry": "false"}))
    with serve_in_thread(provider) as url:
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="none") as one,
            pytest.raises(openai.InternalServerError),
        ):
            one.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
        with (
            anthropic.Anthropic(base_url=url, api_key="none") as other,
            pytest.raises(anthropic.InternalServerError),
        ):
            other.messages.create(model="m", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
    assert provider.total_requests == 2
