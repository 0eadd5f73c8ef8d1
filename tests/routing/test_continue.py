"""A stream that breaks half-way goes on at a target that says it can."""

from __future__ import annotations

import json

import httpx2
import pytest

from resilient_llm import Backoff, Deadline, Policy, Retry, Router, Stream, Target
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.routing.balancers import Priority
from resilient_llm.testing import FakeModel, FakeProvider, Fault

pytestmark = pytest.mark.anyio

ASK = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def ask(provider: FakeProvider, *targets: Target) -> tuple[str, str]:
    policies: list[Policy] = [
        Deadline(60),
        Stream(resume="continue"),
        Retry(backoff=Backoff(initial=0.1, maximum=0.1, jitter="none")),
        Router({"chat": targets}, balancer=Priority()),
    ]
    transport = ResilientTransport(provider.httpx2_transport(), policies=policies)
    async with httpx2.AsyncClient(transport=transport) as client:
        reply = await client.post("http://any.test/v1/chat/completions", json=ASK)
    said = ""
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                said += choice["delta"].get("content") or ""
    return said, reply.text


def target(name: str, *capabilities: str) -> Target:
    return Target(
        name=name, url=f"http://{name}.test/v1", model=name, capabilities={"streaming", *capabilities}
    )


async def test_only_a_target_that_can_is_asked_for_the_rest() -> None:
    provider = FakeProvider(FakeModel(reply="one two three four"))
    provider.script("first", [Fault(cut_after_tokens=2)])
    said, _ = await ask(provider, target("first"), target("second"), target("third", "prefill"))
    assert [request.model for request in provider.requests] == ["first", "third"]
    rest = json.loads(provider.requests[1].raw_body)["messages"][-1]
    assert rest["role"] == "assistant"
    assert said.startswith(rest["content"])


async def test_where_none_can_the_failure_is_told() -> None:
    provider = FakeProvider(FakeModel(reply="one two three four"))
    provider.script("first", [Fault(cut_after_tokens=2)])
    provider.script("third", [Fault(status=500)] * 9)
    _, text = await ask(provider, target("first"), target("second"), target("third", "prefill"))
    assert "second" not in [request.model for request in provider.requests]
    assert "[DONE]" not in text
    assert "error" in text.splitlines()[-2]
