"""What the table of faults is played with through a sidecar: a provider in trouble, sidecars, a caller's wire.

The table, its troubles and its callers are those of `tests/streams`; nothing of them is repeated here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import anyio
import httpx2
from starlette.types import Message, Receive, Scope, Send

from resilient_llm import Stream
from resilient_llm.testing import serve
from tests.sidecar.support import Log, logged, over_sockets
from tests.streams.faults import Call, Caller, Trouble, World, plain_client, pool, sdk
from tests.streams.test_faults import TABLE

PACES = (0.1, 0.3, 0.9)
"""Real seconds for one of the table's: what a machine was too slow for is played again, more slowly."""
SILENCE = 10.0
"""Seconds of the table's without a word that an attempt may have, on a machine with other things to do."""
PATIENCE = 60.0
"""Seconds after which something hangs."""
GIANT = 9 * 1024 * 1024
"""Bytes of an event that is larger than one may be by default."""
CUT = "cut after 40 of 60, truncated chunked body"


class Case(NamedTuple):
    """A row of the table, and whether the second attempt fails alike."""

    name: str
    again: bool

    def trouble(self, dialect: str) -> Trouble:
        return TABLE[self.name][dialect].trouble

    def expected(self, dialect: str) -> Call:
        row = TABLE[self.name][dialect]
        if dialect == "gemini" and row.trouble.stream is not None and row.trouble.stream.resume == "buffer":
            row = TABLE[CUT][dialect]
        return row.alone if self.again else row.retried


CASES = [Case(name, again) for name in TABLE for again in (False, True)]
LARGE = [case for case in CASES if case.name.startswith("oversize event")]
SMALL = [case for case in CASES if case not in LARGE]


@dataclass
class Played:
    """What became of one case."""

    expected: Call
    call: Call
    backoff: float
    """Seconds for which the provider was to be left alone."""
    replies: list[tuple[int, bytes]]
    """Status and body of each reply that the caller had from the sidecar."""
    entries: list[dict[str, Any]]
    """What the access log says."""


class Towards(httpx2.AsyncBaseTransport):
    """Send what a caller asks for to a sidecar, wherever the caller thinks it goes, and keep what comes back."""

    def __init__(
        self, transport: httpx2.AsyncBaseTransport, sidecar: str, request_id: str, prefix: str
    ) -> None:
        self._transport = transport
        self._sidecar = httpx2.URL(sidecar)
        self._request_id = request_id
        self._prefix = prefix.encode()
        self.replies: list[tuple[int, bytes]] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        at = self._sidecar
        path = self._prefix + request.url.raw_path
        request.url = request.url.copy_with(scheme=at.scheme, host=at.host, port=at.port, raw_path=path)
        request.headers["host"] = f"{at.host}:{at.port}"
        request.headers["x-request-id"] = self._request_id
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = Kept(response.stream, response.status_code, self.replies)
        return response


class Kept(httpx2.AsyncByteStream):
    """Pass a body on, and keep it."""

    def __init__(self, stream: httpx2.AsyncByteStream, status: int, kept: list[tuple[int, bytes]]) -> None:
        self._stream = stream
        self._status = status
        self._kept = kept
        self._body = b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._body += chunk
            yield chunk

    async def aclose(self) -> None:
        self._kept.append((self._status, self._body))
        await self._stream.aclose()


class Last:
    """Say that a reply is the last one on its connection."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.transport = getattr(getattr(send, "__self__", None), "transport", None)  # for who breaks it

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await self._send(message)


@dataclass
class Stage:
    """A provider in trouble, and sidecars in front of it, one for each way to treat streams."""

    dialect: str
    cases: InitVar[Iterable[Case]]
    pace: float
    world: World = field(init=False)
    models: dict[Case, str] = field(default_factory=dict)
    sidecars: dict[Case, str] = field(default_factory=dict)

    def __post_init__(self, cases: Iterable[Case]) -> None:
        self.world = World(pace=self.pace, giant=GIANT)
        for number, case in enumerate(case for case in cases if self.dialect in TABLE[case.name]):
            self.models[case] = f"m{number}"
            self.world.add(f"m{number}", case.trouble(self.dialect), again=case.again)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, the only one on its connection: a reset is nothing that a reused one may meet."""
        await self.world(scope, receive, Last(send).send)

    @asynccontextmanager
    async def set(self, clock: float) -> AsyncIterator[None]:
        """Serve everything."""
        async with AsyncExitStack() as stack:
            upstream = await stack.enter_async_context(serve(self))
            urls: dict[str, str] = {}
            for case in self.models:
                treatment = self._treatment(case.trouble(self.dialect).stream)
                if treatment not in urls:
                    url, _ = await stack.enter_async_context(
                        over_sockets(sidecar(upstream, treatment, clock=clock, backoff=self.pace))
                    )
                    urls[treatment] = url
                self.sidecars[case] = urls[treatment]
            yield

    def _treatment(self, stream: Stream | None) -> str:
        """Write what a row wants done with streams as a configuration has it."""
        stream = stream or Stream()
        if not stream.prefill:
            return f'resume = "{stream.resume}"\nmalformed = "{stream.malformed}"'
        models = [self.models[case] for case in self.models if case.trouble(self.dialect).stream == stream]
        return f'resume = "{stream.resume}"\nprefill = {json.dumps(models)}'

    async def play(self, case: Case, caller: Caller, transport: Towards, log: Log) -> Played:
        """Make the call of a case."""
        client = httpx2.AsyncClient(transport=transport, timeout=PATIENCE)
        call = await self.world.call(caller, client, self.dialect, self.models[case])
        with anyio.fail_after(PATIENCE):
            while not (entries := self.entries(case, log)):  # noqa: ASYNC110 - what is waited for tells nobody
                await anyio.sleep(0.01)
        return Played(case.expected(self.dialect), call, self.pace, transport.replies, entries)

    def entries(self, case: Case, log: Log) -> list[dict[str, Any]]:
        return [entry for entry in log.entries if entry["request_id"] == f"call-of-{self.models[case]}"]


def sidecar(upstream: str, treatment: str = "", *, clock: float = PATIENCE, backoff: float = PACES[0]) -> str:
    """Write the configuration of a sidecar."""
    clocks = f"{{headers = {clock}, first_content = {1.5 * clock}, content_gap = {clock}}}"
    # What one row does to a target must not matter to the next.
    alone = f"circuit.enabled = false\nconcurrency.enabled = false\ntimeouts = {clocks}"
    return f"""
    [targets.openai]
    url = "{upstream}/v1"
    dialect = "openai"
    {alone}
    [targets.anthropic]
    url = "{upstream}"
    dialect = "anthropic"
    {alone}
    [targets.gemini]
    url = "{upstream}"
    dialect = "gemini"
    passthrough = true
    {alone}
    [retry]
    max_attempts = 2
    budget_min_per_second = 100
    backoff = {{initial = {backoff}, maximum = {backoff}, jitter = "none"}}
    [stream]
    hold_max = {2 * GIANT}
    max_event_size = {GIANT - 1}
    {treatment}
    """


Check = Callable[[Case, Played], None]


async def check_all(
    dialect: str, check: Check, cases: Iterable[Case] = SMALL, *, by_sdk: bool = False
) -> None:
    """Play rows of a dialect and check each; those that are not right again, since a wrong one is so at every pace."""
    for pace in PACES:
        wrong: dict[Case, AssertionError] = {}
        for case, each in (await play(dialect, cases, pace, by_sdk=by_sdk, clock=SILENCE * pace)).items():
            try:
                check(case, each)
            except AssertionError as error:
                wrong[case] = error
        if not wrong:
            return
        cases = wrong
    raise ExceptionGroup("wrong at every pace", list(wrong.values()))


async def play(
    dialect: str,
    cases: Iterable[Case],
    pace: float = PACES[0],
    *,
    by_sdk: bool = False,
    clock: float = PATIENCE,
) -> dict[Case, Played]:
    """Play rows of a dialect side by side."""
    stage = Stage(dialect, cases, pace)
    played: dict[Case, Played] = {}

    async def one(case: Case, transport: httpx2.AsyncBaseTransport, log: Log) -> None:
        url, model = stage.sidecars[case], stage.models[case]
        prefix = "/gemini" if dialect == "gemini" else ""
        towards = Towards(transport, url, f"call-of-{model}", prefix)
        caller = (
            sdk(dialect, httpx2.AsyncClient(transport=towards, timeout=60), url) if by_sdk else plain_client
        )
        played[case] = await stage.play(case, caller, towards, log)

    with logged() as log, anyio.fail_after(PATIENCE):
        async with (
            stage.set(clock),
            pool() as transport,
            anyio.create_task_group() as tasks,
        ):
            for case in stage.models:
                tasks.start_soon(one, case, transport, log)
                await anyio.sleep(0.03)  # all at once they would hold each other up
        for case, each in played.items():  # a call that was logged twice has had the time for it
            each.entries = stage.entries(case, log)
    return played
