"""Redirects of providers: no answer of a model's, so that another target is asked, and never followed."""

from __future__ import annotations

import httpx2
import openai
import pytest

from resilient_llm.testing import FakeProvider, Fault
from tests.sidecar.hostile_upstream import GOOD, hostile, whole
from tests.sidecar.raw import Client, get
from tests.sidecar.support import ASK, OPEN, ask, logged, memory

pytestmark = pytest.mark.anyio

TWO = """
[targets.one]
url = "http://one.example/v1"
[targets.two]
url = "http://two.example/v1"
[models]
m.targets = ["one/red", "two/good"]
[routing]
balancer = "priority"
"""
STATUSES = [300, 301, 302, 303, 304, 307, 308]
ELSEWHERE = {"location": "http://elsewhere.example/login"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", STATUSES)
async def test_another_target_is_asked_instead(status: int, stream: bool) -> None:
    provider = FakeProvider()
    provider.script("red", [Fault(status=status, headers=ELSEWHERE)])
    sidecar = memory(provider, TWO)
    with logged() as log:
        answered = await ask(sidecar, {**ASK, "model": "m", "stream": stream})
    assert answered.status == 200
    assert answered.headers[b"x-resilient-llm-target"] == b"two/good"
    assert [request.model for request in provider.requests] == ["red", "good"]
    (entry,) = log.entries
    assert (entry["outcome"], entry["attempts"]) == ("ok", 2)


@pytest.mark.parametrize("more", ["", "[retry]\nenabled = false"], ids=["retry", "none"])
@pytest.mark.parametrize("status", STATUSES)
async def test_what_is_redirected_everywhere_is_a_502_that_says_so(status: int, more: str) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=status, headers=ELSEWHERE)] * 9)
    with logged() as log:
        answered = await ask(memory(provider, OPEN + more))
    assert (answered.status, answered.json["error"]["code"]) == (502, "redirected")
    assert b"location" not in answered.headers
    assert provider.total_requests == (1 if more else 3)
    (entry,) = log.entries
    assert (entry["status"], entry["outcome"], entry["error"]) == (502, "error", "redirected")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("path", ["/main/v1/chat/completions", "/main/v1/embeddings"])
async def test_who_asks_a_target_by_its_name_gets_its_redirects(path: str, status: int) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=status, headers=ELSEWHERE)])
    answered = await ask(memory(provider, f"{OPEN}passthrough = true\n"), path=path)
    assert answered.status == status
    assert answered.headers[b"location"] == b"http://elsewhere.example/login"
    assert provider.total_requests == 1


@pytest.mark.realtime
@pytest.mark.parametrize("status", [b"302 Found", b"307 Again", b"308 For ever"])
def test_a_client_that_follows_redirects_takes_its_key_nowhere(status: bytes) -> None:
    with hostile() as (sidecar, upstream), hostile() as (_, elsewhere):
        location = b"location: " + elsewhere.url.encode() + b"/v1/chat/completions"
        upstream.reply, elsewhere.reply = whole(b"", status, location), whole(GOOD)
        client = openai.OpenAI(base_url=f"{sidecar.url}/v1", api_key="key-of-a-client-0123", max_retries=0)
        with client, pytest.raises(openai.InternalServerError, match="redirected"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        answer = httpx2.post(f"{sidecar.url}/v1/chat/completions", json=ASK, follow_redirects=True)
        assert answer.status_code == 502
        assert elsewhere.asked == []
        assert len(upstream.asked) == 2


@pytest.mark.realtime
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_list_that_its_reader_has_is_no_redirect(method: str) -> None:
    with hostile() as (sidecar, upstream):
        for status, passed in ((b"302 Found", 502), (b"304 Not Modified", 304)):
            upstream.reply = whole(b"", status, b"location: http://elsewhere.example/")
            with Client(sidecar.url) as client:
                client.send(get(b"/v1/models", b'if-none-match: "1"').replace(b"GET", method.encode()))
                answer = client.answer(method)
            assert answer.status == passed
