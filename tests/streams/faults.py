"""What the table of faults is played with: upstreams that fail in one way, and callers that say what they got.

An account of a call is a line: how many tokens came, and what came instead of the rest; or the status and the name of
the error where no stream began. Callers are a plain HTTP client, which reads the bytes, and the providers' SDKs.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import anthropic
import anyio
import httpx2
import openai
from google import genai
from google.genai import errors as genai_errors
from starlette.types import Message, Receive, Scope, Send

from resilient_llm import AttemptTimeout, Backoff, Deadline, Retry, Stream
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import OK, FakeModel, FakeProvider, Fault, Latency
from resilient_llm.testing._connection import break_connection
from resilient_llm.testing.httpx2 import ASGIStreamTransport
from tests.streams.gemini import FakeGemini

TEXT = " ".join(f"w{number}" for number in range(60))

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/{model}:streamGenerateContent?alt=sse",
}


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One way for a stream to fail; `stream` is a policy that concerns it."""

    fault: Fault = OK
    then: Fault | None = None
    """What the second attempt meets, instead of nothing or the same."""
    giant_at: int | None = None
    """Which token is larger than an event may be."""
    cut_at_end: bool = False
    """Whether the connection is closed right after the last byte, without an end of the body."""
    stream: Stream | None = None


class Call(NamedTuple):
    """How one call went: what the caller got, when the provider was asked, and when it was over, in seconds."""

    got: str
    asked: tuple[float, ...]
    took: float


@dataclass(kw_only=True)
class World:
    """Upstreams, and clocks for them, of which everything is slowed down by `pace`."""

    pace: float = 1.0
    giant: int = 100_000
    """Bytes of an event that is too large."""
    troubles: dict[str, tuple[Trouble, bool]] = field(default_factory=dict)
    """By the name of a model, and whether its second attempt meets the trouble too."""

    def __post_init__(self) -> None:
        latency = Latency(headers=0.5 * self.pace, first_token=0.5 * self.pace, per_token=0.1 * self.pace)
        self.provider = FakeProvider(FakeModel(latency=latency, reply=self._reply))
        self.gemini = FakeGemini(FakeModel(latency=latency), self._reply)

    def add(self, model: str, trouble: Trouble, *, again: bool) -> None:
        """Have a model that is in trouble at the first attempt, or at every one."""
        self.troubles[model] = (trouble, again)
        faults = iter([self._scaled(trouble.fault)])
        then = self._scaled(trouble.then) if trouble.then is not None else None

        def choose(_request: object = None) -> Fault:
            later = self._scaled(trouble.fault) if again else Fault()
            return next(faults, later if then is None else then)

        self.provider.script(model, choose)
        self.gemini.script(model, choose)

    def _scaled(self, fault: Fault) -> Fault:
        return fault if fault.ping_every is None else replace(fault, ping_every=fault.ping_every * self.pace)

    def _reply(self, request: Any) -> str:
        trouble, again = self.troubles[request.model]
        messages = request.body.get("messages") or [{}]
        if messages[-1].get("role") == "assistant":
            return TEXT.removeprefix(messages[-1]["content"])
        number = len(self.asked(request.model, 0))
        if trouble.giant_at is None or (number > 1 and not again):
            return TEXT
        words = TEXT.split(" ")
        words[trouble.giant_at] = "x" * self.giant
        return " ".join(words)

    def asked(self, model: str, since: float) -> tuple[float, ...]:
        """Say when the provider was asked for a model."""
        requests: list[Any] = [*self.provider.requests, *self.gemini.requests]
        return tuple(request.arrived - since for request in requests if request.model == model)

    def policies(self, model: str) -> list[Any]:
        """Give the policies that a call of a model goes through."""
        stream = self.troubles[model][0].stream
        return [
            Deadline(60),
            *([] if stream is None else [stream]),
            Retry(max_attempts=2, backoff=Backoff(initial=self.pace, maximum=self.pace, jitter="none")),
            AttemptTimeout(headers=4 * self.pace, first_content=6 * self.pace, content_gap=4 * self.pace),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, over a socket or in memory."""
        if scope["type"] != "http":
            await self.provider(scope, receive, send)
            return
        upstream = self.gemini if scope["path"].endswith(":streamGenerateContent") else self.provider
        line = _Line(
            scope, receive, send, [model for model in self.troubles if self.troubles[model][0].cut_at_end]
        )
        await upstream(scope, line.receive, line.send)

    def client(self, model: str, transport: httpx2.AsyncBaseTransport) -> httpx2.AsyncClient:
        """Make a client for one model. It need not be closed, nor may the transport be that others use."""
        resilient = ResilientTransport(transport, policies=self.policies(model))
        return httpx2.AsyncClient(transport=resilient, timeout=60)

    async def call(self, caller: Caller, client: httpx2.AsyncClient, dialect: str, model: str) -> Call:
        """Make one call, and give an account of it."""
        began = anyio.current_time()
        got = await caller(client, dialect, model)
        return Call(got, self.asked(model, began), anyio.current_time() - began)


class _Line:
    """A connection to a server that is closed after the last byte, if the request names one of `models`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, models: list[str]) -> None:
        self.transport = getattr(getattr(send, "__self__", None), "transport", None)  # for who breaks it
        self._scope = scope
        self._receive = receive
        self._send = send
        self._models = [model.encode() for model in models]
        self._asked = scope["path"].encode()

    async def receive(self) -> Message:
        message = await self._receive()
        self._asked += message.get("body", b"")
        return message

    async def send(self, message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body")
        if last and any(
            b'"%b"' % model in self._asked or b"/%b:" % model in self._asked for model in self._models
        ):
            await break_connection(self._scope, self._receive, self._send, "close")
        else:
            await self._send(message)


Caller = Callable[[httpx2.AsyncClient, str, str], Awaitable[str]]


def memory(world: World) -> httpx2.AsyncBaseTransport:
    """Reach a world in memory."""
    return ASGIStreamTransport(world)


# Callers


def request_of(dialect: str, model: str) -> dict[str, Any]:
    """Give what is asked."""
    if dialect == "gemini":
        return {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    if dialect == "responses":
        return {"model": model, "input": "hi", "stream": True}
    return {
        "model": model,
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    }


async def plain_client(client: httpx2.AsyncClient, dialect: str, model: str) -> str:
    """Read the bytes, and find in them what an SDK would."""
    path = PATHS[dialect].format(model=model)
    response = await client.send(
        client.build_request("POST", f"http://h.example{path}", json=request_of(dialect, model)), stream=True
    )
    body = b"".join([chunk async for chunk in response.aiter_raw()])
    await response.aclose()
    if response.status_code != 200:
        return f"{response.status_code} {name_of(json.loads(body))}"
    assert response.headers["content-type"].startswith("text/event-stream")
    words, broken, error = "", 0, None
    events = body.replace(b"\r\n", b"\n").split(b"\n\n")
    assert events.pop() == b""
    for event in events:
        assert error is None, "an error is the end"
        data = b"".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
        if not data or data == b"[DONE]":
            continue
        try:
            parsed = json.loads(data)
        except ValueError:
            broken += 1
            continue
        if parsed.get("error") or parsed.get("type") == "error":
            error = name_of(parsed)
        words += said(dialect, parsed)
    return account(words, error) + (f", {broken} malformed" if broken else "")


def account(words: str, error: str | None) -> str:
    """Say what was got of a stream."""
    count = len(words.split())
    if not broken_words(words):
        words = TEXT
    return f"{count} tokens" + (f", then {error}" if error else "")


def broken_words(words: str) -> bool:
    """Tell whether the words are the beginning of the text; one may be missing that was malformed."""
    return not TEXT.startswith(words)


def said(dialect: str, event: dict[str, Any]) -> str:
    """Give the text in an event."""
    if dialect == "chat":
        return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
    if dialect == "responses":
        return str(event["delta"]) if event.get("type") == "response.output_text.delta" else ""
    if dialect == "messages":
        return str(event["delta"].get("text", "")) if event.get("type") == "content_block_delta" else ""
    parts = [part for choice in event.get("candidates", []) for part in choice["content"]["parts"]]
    return "".join(part["text"] for part in parts)


def name_of(body: Any) -> str:
    """Give the name of an error in a provider's format."""
    error = body.get("error") or body
    details = error.get("details")
    if isinstance(details, dict):
        return str(details["error_code"])
    if isinstance(details, list):
        return str(details[0]["reason"])
    status = error.get("status")
    return str(status if isinstance(status, str) else error.get("code") or error.get("type"))


class ToldError(Exception):
    """An error that an SDK gives as an event."""


Ask = Callable[[str], AsyncIterator[str]]
"""Ask a model, and give the pieces of its answer."""


def sdk(dialect: str, client: httpx2.AsyncClient, url: str) -> Caller:
    """Ask with the dialect's own SDK, whose retries are on: they would multiply if they were not told to rest."""
    ask = SDKS[dialect](client, url)

    async def caller(  # noqa: PLR0911 - each SDK has its own way to tell
        _client: httpx2.AsyncClient, _dialect: str, model: str
    ) -> str:
        words: list[str] = []
        try:
            async for word in ask(model):
                words.append(word)  # noqa: PERF401 - what came before an error counts
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            name = name_of(error.body)
            return (
                account("".join(words), name) if error.status_code == 200 else f"{error.status_code} {name}"
            )
        except ToldError as error:
            return account("".join(words), str(error))
        except openai.APIError as error:
            return account("".join(words), name_of(error.body))
        except genai_errors.UnknownApiResponseError:
            return account("".join(words), "JSONDecodeError")
        except genai_errors.APIError as error:
            return _of_gemini(error, "".join(words))
        except json.JSONDecodeError as error:
            return account("".join(words), type(error).__name__)
        return account("".join(words), None)

    return caller


def _of_gemini(error: genai_errors.APIError, words: str) -> str:
    """Tell an error in a stream, of which this SDK makes an exception with a status too."""
    name = name_of(error.details)
    streamed = error.response is None or getattr(error.response, "status_code", 200) == 200
    return account(words, name) if streamed else f"{error.code} {name}"


def chat(client: httpx2.AsyncClient, url: str) -> Ask:
    asking = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=client)

    async def ask(model: str) -> AsyncIterator[str]:
        async for chunk in await asking.chat.completions.create(**request_of("chat", model)):
            for choice in chunk.choices:
                yield choice.delta.content or ""

    return ask


def responses(client: httpx2.AsyncClient, url: str) -> Ask:
    asking = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=client)

    async def ask(model: str) -> AsyncIterator[str]:
        async for event in await asking.responses.create(**request_of("responses", model)):
            if event.type == "response.output_text.delta":
                yield event.delta
            elif event.type == "error":  # of its own kind, which this SDK hands on and does not raise
                raise ToldError(event.code)

    return ask


def messages(client: httpx2.AsyncClient, url: str) -> Ask:
    asking = anthropic.AsyncAnthropic(base_url=url, api_key="none", http_client=client)

    async def ask(model: str) -> AsyncIterator[str]:
        async for event in await asking.messages.create(**request_of("messages", model)):
            if event.type == "content_block_delta":
                yield getattr(event.delta, "text", "")

    return ask


def gemini(client: httpx2.AsyncClient, url: str) -> Ask:
    idle = httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(500))
    )  # or it would make one
    options = genai.types.HttpOptions(base_url=url, httpx_client=idle, httpx_async_client=client)
    asking = genai.Client(api_key="none", http_options=options)

    async def ask(model: str) -> AsyncIterator[str]:
        async for chunk in await asking.aio.models.generate_content_stream(model=model, contents="hi"):
            yield chunk.text or ""

    return ask


SDKS: dict[str, Callable[[httpx2.AsyncClient, str], Ask]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "gemini": gemini,
}


def pool() -> httpx2.AsyncHTTPTransport:
    """Reach servers over sockets."""
    return httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None))
