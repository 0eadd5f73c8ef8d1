"""One logical model behind real SDKs and real sockets, answered by several providers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from functools import partial

import anthropic
import httpx2
import openai
import pytest

import resilient_llm.httpx2
from resilient_llm import AttemptTimeout, Backoff, CircuitBreaker, Deadline, Policy, Retry, Router, Target
from resilient_llm.credentials import Credential
from resilient_llm.routing.balancers import Priority, WeightedRandom
from resilient_llm.testing import FakeModel, FakeProvider, Fault, serve

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

QUICK = Backoff(initial=0.01, maximum=0.01)
NAMES = ("red", "green", "blue")


def provider(name: str) -> FakeProvider:
    return FakeProvider(FakeModel(reply=f"this is {name}"))


@contextlib.asynccontextmanager
async def three() -> AsyncIterator[tuple[dict[str, FakeProvider], list[Target]]]:
    providers = {name: provider(name) for name in NAMES}
    async with contextlib.AsyncExitStack() as stack:
        targets = [
            Target(
                name=name,
                url=f"{await stack.enter_async_context(serve(each))}/v1",
                provider="openai",
                model=f"model-of-{name}",
                credential=Credential(name=f"key-of-{name}", value=partial("sk-{}".format, name)),
            )
            for name, each in providers.items()
        ]
        yield providers, targets


@contextlib.asynccontextmanager
async def client(*policies: Policy) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = resilient_llm.httpx2.ResilientTransport(policies=policies)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(
            base_url="http://anywhere.invalid/v1", api_key="of-the-caller", http_client=http
        )


async def test_the_openai_sdk_gets_answers_from_three_providers_and_hears_who_answered() -> None:
    async with three() as (providers, targets):
        router = Router({"chat": targets}, balancer=WeightedRandom())
        async with client(Deadline(30), Retry(backoff=QUICK), router, CircuitBreaker()) as sdk:
            heard = set()
            for _ in range(40):
                raw = await sdk.chat.completions.with_raw_response.create(
                    model="chat", messages=[{"role": "user", "content": "who?"}]
                )
                name = raw.headers["x-resilient-llm-target"]
                completion = raw.parse()
                assert completion.model == f"model-of-{name}"
                assert completion.choices[0].message.content == f"this is {name}"
                heard.add(name)
        assert heard == set(NAMES)
        for name, each in providers.items():
            assert {request.headers["authorization"] for request in each.requests} == {f"Bearer sk-{name}"}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(status=429, headers={"retry-after": "30"}),
        Fault(status=401),
        Fault(reset=True),
        Fault(cut_after_tokens=0),
        Fault(delay_headers=math.inf),
    ],
    ids=["500", "429", "401", "reset", "cut", "silence"],
)
async def test_a_stream_comes_from_the_next_provider_unseen(fault: Fault) -> None:
    async with three() as (providers, targets):
        providers["red"].script("model-of-red", [fault] * 9)
        router = Router({"chat": targets}, balancer=Priority())
        policies: list[Policy] = [
            Deadline(30),
            Retry(backoff=QUICK),
            router,
            CircuitBreaker(),
            AttemptTimeout(first_content=0.3),
        ]
        async with client(*policies) as sdk:
            stream = await sdk.chat.completions.create(
                model="chat", messages=[{"role": "user", "content": "who?"}], stream=True
            )
            said = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in said if chunk.choices)
        assert text == "this is green"
        assert {chunk.model for chunk in said} == {"model-of-green"}
        assert [each.total_requests for each in providers.values()] == [1, 1, 0]


async def test_the_anthropic_sdk_is_routed_too() -> None:
    one, other = provider("one"), provider("other")
    one.script("claude-a", [Fault(status=529)])
    async with serve(one) as first, serve(other) as second:
        key = Credential(name="key", value=lambda: "sk-ant-ours")
        targets = [
            Target(name="one", url=first, provider="anthropic", model="claude-a", credential=key),
            Target(name="other", url=second, provider="anthropic", model="claude-b", credential=key),
        ]
        policies: list[Policy] = [Deadline(30), Retry(backoff=QUICK), Router(targets, balancer=Priority())]
        transport = resilient_llm.httpx2.ResilientTransport(policies=policies)
        async with httpx2.AsyncClient(transport=transport) as http:
            sdk = anthropic.AsyncAnthropic(
                base_url="http://anywhere.invalid", api_key="caller", http_client=http
            )
            message = await sdk.messages.create(
                model="claude", max_tokens=64, messages=[{"role": "user", "content": "hi"}]
            )
        assert message.model == "claude-b"
        assert [request.headers["x-api-key"] for request in (*one.requests, *other.requests)] == [
            "sk-ant-ours"
        ] * 2
