"""CLS-11: the error that says what is wrong with the request is not hidden by a failure elsewhere."""

from __future__ import annotations

import httpx2
import pytest

from resilient_llm import Backoff, Policy, Retry, Router, Target
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.routing.balancers import Priority
from resilient_llm.testing import FakeProvider, Fault

pytestmark = pytest.mark.anyio

TEXT = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
TOO_LONG = Fault(status=400, code="context_length_exceeded", message=TEXT)


@pytest.mark.parametrize("later", [Fault(status=500), Fault(status=503), Fault(reset=True)])
async def test_cls_11_the_callers_error_survives_a_failure_of_the_next_target(later: Fault) -> None:
    provider = FakeProvider()
    provider.script("small", [TOO_LONG] * 9)
    provider.script("large", [later] * 9)
    targets = {
        "chat": Target(name="small", url="http://small.test/v1", model="small", context_window=8_192),
        "long": Target(name="large", url="http://large.test/v1", model="large", context_window=100_000),
    }
    policies: list[Policy] = [
        Retry(backoff=Backoff(initial=0.1, maximum=0.1)),
        Router(targets, fallbacks={"chat": "long"}, balancer=Priority()),
    ]
    transport = ResilientTransport(provider.httpx2_transport(), policies=policies)
    async with httpx2.AsyncClient(transport=transport) as client:
        ask = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        reply = await client.post("http://any.test/v1/chat/completions", json=ask)
    assert [request.model for request in provider.requests][:2] == ["small", "large"]
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["message"] == TEXT
