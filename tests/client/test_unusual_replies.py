"""Replies that are not what they seem at the client door: policies' own, stored errors, endless errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import httpx2
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from resilient_llm import Bulkhead, Call, CallNext, CircuitBreaker, CircuitState, Deadline, Reply, Retry
from resilient_llm.streams import BufferedStream

pytestmark = pytest.mark.anyio

URL = "http://provider.example/v1/chat/completions"
BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}


class Cached:
    """A policy of a user's own that answers by itself."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Answer."""
        reply: Reply = self.reply
        return reply


def client_of(respond: Any, *policies: Any) -> httpx.AsyncClient:
    transport = resilient_llm.httpx.ResilientTransport(httpx.MockTransport(respond), policies=policies)
    return httpx.AsyncClient(transport=transport)


def unreachable(_request: httpx.Request) -> httpx.Response:
    raise AssertionError("nothing must be sent")


@pytest.mark.parametrize("complete", [True, False])
async def test_a_policy_may_answer_by_itself(complete: bool) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    headers = [(b"content-type", b"application/json")]
    reply = Reply(200, headers, BufferedStream([b'{"cached"', b": true}"]), complete=complete)
    async with client_of(unreachable, bulkhead, Cached(reply)) as client:
        response = await client.post(URL, json=BODY)
    assert response.json() == {"cached": True}
    assert bulkhead.in_use() == 0


class Marked:
    """A policy of a user's own that adds to the list of a reply's headers, or makes another one."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Mark what comes back."""
        reply = await call_next(call)
        if self.in_place:
            reply.headers.append((b"x-mark", b"1"))
        else:
            reply.headers = [*reply.headers, (b"x-mark", b"1")]
        return reply


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("library", [httpx, httpx2], ids=lambda library: library.__name__)
async def test_headers_that_a_policy_adds_to_a_reply_reach_the_caller(library: Any, in_place: bool) -> None:
    def respond(_request: object) -> Any:
        return library.Response(200, headers=[("x-own", "2"), ("X-Own", "3")], json={"id": "chatcmpl-1"})

    door = {httpx: resilient_llm.httpx, httpx2: resilient_llm.httpx2}[library]
    transport = door.ResilientTransport(library.MockTransport(respond), policies=[Marked(in_place=in_place)])
    async with library.AsyncClient(transport=transport) as client:
        response = await client.post(URL, json=BODY)
    assert response.headers.get_list("x-own") == ["2", "3"]
    assert response.headers["x-mark"] == "1"
    assert response.json() == {"id": "chatcmpl-1"}


class Moved:
    """A policy of a user's own that sends every attempt with a header more, to another URL if it has one."""

    def __init__(self, url: str | None) -> None:
        self.url = url

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Change the request."""
        headers = [*call.request.headers, (b"x-mark", b"1")]
        call.request = call.request.replace(url=self.url).replace(headers=headers)
        return await call_next(call)


@pytest.mark.parametrize("url", [None, "http://other.example/v1/chat/completions?a=b"])
@pytest.mark.parametrize("library", [httpx, httpx2], ids=lambda library: library.__name__)
async def test_a_request_that_a_policy_changes_is_sent_so(library: Any, url: str | None) -> None:
    seen: list[Any] = []

    def respond(request: Any) -> Any:
        seen.append(request)
        return library.Response(200, json={"id": "chatcmpl-1"})

    door = {httpx: resilient_llm.httpx, httpx2: resilient_llm.httpx2}[library]
    transport = door.ResilientTransport(library.MockTransport(respond), policies=[Moved(url)])
    async with library.AsyncClient(transport=transport) as client:
        response = await client.post(URL, json=BODY, extensions={"mine": 1})
    (sent,) = seen
    assert str(sent.url) == (URL if url is None else url)
    assert sent.headers["x-mark"] == "1"
    assert sent.content == response.request.content
    assert sent.extensions["mine"] == 1
    assert "x-mark" not in response.request.headers
    assert str(response.request.url) == URL


@pytest.mark.parametrize("reply", [None, httpx.Response(200)], ids=["nothing", "a response of the library"])
async def test_a_policy_that_returns_no_reply_is_told_so_and_leaks_nothing(reply: Any) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    async with client_of(unreachable, bulkhead, Cached(reply)) as client:
        with pytest.raises(TypeError, match="where a Reply is expected"):
            await client.post(URL, json=BODY)
    assert bulkhead.in_use() == 0


@pytest.mark.parametrize(
    "body",
    [
        {"object": "fine_tuning.job", "status": "failed", "error": {"code": "x", "message": "no"}},
        {"object": "fine_tuning.job", "status": "succeeded", "error": {"code": None, "message": None}},
        {"error": "none"},
        [{"type": "error"}],
    ],
)
async def test_a_stored_thing_may_hold_an_error_and_is_no_failure(body: Any) -> None:
    breaker = CircuitBreaker(consecutive_failures=1)
    sent = 0

    def respond(_request: httpx.Request) -> httpx.Response:
        nonlocal sent
        sent += 1
        return httpx.Response(200, json=body)

    async with client_of(respond, Retry(), breaker) as client:
        response = await client.get("http://provider.example/v1/fine_tuning/jobs/1")
    assert (response.status_code, response.json(), sent) == (200, body, 1)
    assert breaker.state("provider.example") is CircuitState.CLOSED


async def test_an_endless_error_holds_nothing() -> None:
    bulkhead = Bulkhead(max_concurrent=1)

    class Endless(httpx.AsyncByteStream):
        closed = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                await anyio.sleep(0.001)
                yield b"x" * 100_000

        async def aclose(self) -> None:
            self.closed = True

    stream = Endless()
    respond = lambda _request: httpx.Response(500, stream=stream)  # noqa: E731
    async with client_of(respond, Deadline(10), bulkhead) as client:
        response = await client.post(URL, json=BODY)
    assert response.status_code == 500
    assert len(response.content) < 2_000_000
    assert stream.closed
    assert bulkhead.in_use() == 0


async def test_a_deadline_that_has_passed_sends_nothing() -> None:
    from resilient_llm import ambient  # noqa: PLC0415

    with ambient(timeout=0.001):
        await anyio.sleep(0.01)
        for policies in ([Deadline(10)], [Retry()], []):
            async with client_of(unreachable, *policies) as client:
                assert (await client.post(URL, json=BODY)).status_code == 504


async def test_pipelines_that_share_a_retry_do_not_share_circuits() -> None:
    retry = Retry(max_attempts=2)
    failing = CircuitBreaker(consecutive_failures=1)
    fail = lambda _request: httpx.Response(503)  # noqa: E731
    async with client_of(fail, retry, failing) as client:
        await client.post(URL, json=BODY)
    sent = 0

    def count(_request: httpx.Request) -> httpx.Response:
        nonlocal sent
        sent += 1
        return httpx.Response(503)

    async with client_of(count, retry) as client:
        await client.post(URL, json=BODY)
    assert sent == 2


async def test_a_synchronous_client_in_any_form_is_told_what_to_do() -> None:
    with (
        pytest.raises(TypeError, match="AsyncClient"),
        httpx.Client(
            transport=resilient_llm.httpx.ResilientTransport()  # type: ignore[arg-type]
        ),
    ):
        pass
    httpx.Client(transport=resilient_llm.httpx.ResilientTransport()).close()  # type: ignore[arg-type]
