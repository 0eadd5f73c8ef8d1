"""HTTP-07: HTTP/2 is off by default; a GOAWAY of a transport that has it on leaves it open what was carried out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from resilient_llm import Backoff, Policy, Retry
from resilient_llm.outcome import Scope, Verdict
from resilient_llm.providers import classify_exception

QUICK = Backoff(initial=0.01, maximum=0.01)
GOAWAY = "<ConnectionTerminated error_code:0, last_stream_id:1999, additional_data:None>"
LIBRARIES = [(httpx, resilient_llm.httpx), (httpx2, resilient_llm.httpx2)]


@pytest.mark.parametrize(("library", "ours"), LIBRARIES, ids=["httpx", "httpx2"])
def test_http_07_http_2_is_off_by_default(library: ModuleType, ours: Any) -> None:
    inner = ours.ResilientTransport()._transport
    assert isinstance(inner, library.AsyncHTTPTransport)
    assert inner._pool._http2 is False


@pytest.mark.parametrize(("library", "_ours"), LIBRARIES, ids=["httpx", "httpx2"])
def test_http_07_a_request_may_have_been_carried_out(library: ModuleType, _ours: Any) -> None:
    outcome = classify_exception(library.RemoteProtocolError(GOAWAY))
    assert outcome is not None
    assert (outcome.verdict, outcome.scope) == (Verdict.FAILURE, Scope.TARGET)
    assert (outcome.retryable, outcome.ambiguous) == (True, True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("policy", "requests"), [(Retry(backoff=QUICK), 2), (Retry(retry_ambiguous=False), 1)]
)
@pytest.mark.parametrize(("library", "ours"), LIBRARIES, ids=["httpx", "httpx2"])
async def test_http_07_it_is_sent_again_only_as_rty_06_allows(
    library: ModuleType, ours: Any, policy: Policy, requests: int
) -> None:
    seen = 0

    def terminated_once(_request: object) -> object:
        nonlocal seen
        seen += 1
        if seen == 1:
            raise library.RemoteProtocolError(GOAWAY)
        answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
        return library.Response(200, json=answer)

    transport = ours.ResilientTransport(library.MockTransport(terminated_once), policies=[policy])
    async with library.AsyncClient(transport=transport) as client:
        reply = await client.post("http://a.test/v1/chat/completions", json={"model": "m", "messages": []})
    assert seen == requests
    assert reply.status_code == (200 if requests == 2 else 502)
