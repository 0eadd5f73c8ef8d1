"""What a provider denies one request takes no key from the others: of the same target, for other models and tenants."""

from __future__ import annotations

from collections.abc import Mapping

import httpx2
import pytest

from resilient_llm import Backoff, Credential, Policy, Retry, Router, Target
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.routing.balancers import Priority
from resilient_llm.testing import FakeProvider, Fault

pytestmark = pytest.mark.anyio

HTML = b"<!DOCTYPE html><html><title>Attention Required! | Cloudflare</title></html>"
OPENAI = {"message": "Project `p` does not have access to model `m`", "code": "model_not_found"}
OPENROUTER = {"message": "This request requires more credits, or fewer max_tokens.", "code": 402}
ANTHROPIC = {"type": "permission_error", "message": "Your API key does not have permission to use it."}
GEMINI = {"code": 403, "message": "You may not access the File abc.", "status": "PERMISSION_DENIED"}
SCOPES = {"message": "You have insufficient permissions for this operation. Missing scopes: api.files.read."}


def denied(status: int, error: Mapping[str, object]) -> Fault:
    return Fault(status=status, body={"error": error})


DENIED = {
    "model": denied(403, OPENAI),
    "max_tokens": denied(402, OPENROUTER),
    "permission": denied(403, ANTHROPIC),
    "file": denied(403, GEMINI),
    "scopes": denied(401, SCOPES),
    "nothing said": Fault(status=403, body=b""),
    "firewall": Fault(status=403, body=HTML, headers={"content-type": "text/html"}),
}


def asks(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def target(name: str, key: Credential) -> Target:
    return Target(name=name, url=f"http://{name}.test/v1", provider="openai", credential=key)


def client(provider: FakeProvider, *targets: Target) -> httpx2.AsyncClient:
    policies: list[Policy] = [
        Retry(backoff=Backoff(initial=0.1, maximum=0.1)),
        Router(targets, balancer=Priority()),
    ]
    transport = ResilientTransport(provider.httpx2_transport(), policies=policies)
    return httpx2.AsyncClient(transport=transport, base_url="http://any.test/v1")


@pytest.mark.parametrize("fault", DENIED.values(), ids=DENIED)
async def test_the_key_stays_good_for_others(fault: Fault) -> None:
    provider = FakeProvider()
    provider.script("theirs", [fault] * 9)
    async with client(provider, target("only", Credential(name="key", value=lambda: "sk-ours"))) as http:
        for _ in range(3):
            assert (await http.post("/chat/completions", json=asks("theirs"))).status_code == fault.status
            assert (await http.post("/chat/completions", json=asks("ours"))).status_code == 200
    assert provider.total_requests == 6  # each of them asked once


@pytest.mark.parametrize("fault", DENIED.values(), ids=DENIED)
async def test_another_target_may_do_it(fault: Fault) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    keys = [Credential(name=name, value=lambda: "sk-ours") for name in ("one", "other")]
    async with client(provider, target("one", keys[0]), target("other", keys[1])) as http:
        assert (await http.post("/chat/completions", json=asks("m"))).status_code == 200
        provider.script("m", [])
        assert (await http.post("/chat/completions", json=asks("m"))).status_code == 200
    assert [request.headers["host"] for request in provider.requests] == [
        "one.test",
        "other.test",
        "one.test",
    ]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=401),
        denied(403, {"message": "Your API key was reported as leaked.", "status": "PERMISSION_DENIED"}),
        denied(402, {"message": "Insufficient Balance"}),
        denied(400, {"message": "Organization has been restricted.", "code": "organization_restricted"}),
    ],
    ids=["401", "leaked", "no money", "restricted"],
)
async def test_a_key_that_is_of_no_use_is_set_aside(fault: Fault) -> None:
    provider = FakeProvider()
    provider.script("theirs", [fault] * 9)
    async with client(provider, target("only", Credential(name="key", value=lambda: "sk-ours"))) as http:
        await http.post("/chat/completions", json=asks("theirs"))
        before = provider.total_requests
        assert (await http.post("/chat/completions", json=asks("ours"))).status_code == 503
    assert provider.total_requests == before
