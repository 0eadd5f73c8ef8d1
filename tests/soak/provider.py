"""A provider of the soak, as a program: it says whose request it answers, fails by chance, and keeps a ledger.

`python -m tests.soak.provider PORT NAME LEDGER SEED`. What it gives out in full it has written down before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import TextIO

import anyio
from starlette.types import Message, Receive, Scope, Send

from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency, random_faults, serve
from resilient_llm.testing._request_log import ProviderRequest

WORDS = "one two three four five six seven eight nine ten eleven twelve"
FAULTS = (
    (0.03, Fault(status=500)),
    (0.03, Fault(status=429, headers={"retry-after": "1"})),
    (0.02, Fault(status=503)),
    (0.01, Fault(status=400, message="I do not like it")),
    (0.003, Fault(status=401)),
    (0.02, Fault(reset=True)),
    (0.02, Fault(reset_after_tokens=3)),
    (0.02, Fault(cut_after_tokens=3)),
    (0.01, Fault(stall_after_tokens=0)),
    (0.01, Fault(stall_after_tokens=3)),
    (0.01, Fault(end_after_tokens=3)),
    (0.01, Fault(error_event_at=3)),
    (0.01, Fault(empty_stream=True)),
    (0.01, Fault(omit_done=True)),
    (0.03, Fault(delay_headers=1.0)),
    (0.02, Fault(token_delay=0.2)),
)

_request: ContextVar[ProviderRequest] = ContextVar("request")


def expected(request_id: str) -> str:
    """Give the one reply to a request."""
    return f"{request_id} {WORDS}"


class Provider:
    """Answer each request with its own id, and write down what is given out in full."""

    def __init__(self, name: str, ledger: TextIO, rng: Random) -> None:
        self._from = f"{name}.{os.getpid()}"
        self._ledger = ledger
        self._draw = random_faults(FAULTS, rng=rng)
        model = FakeModel(
            reply=lambda request: expected(request.headers["x-request-id"]),
            latency=Latency(headers=0.02, per_token=0.02, spread=0.3),
        )
        self._fake = FakeProvider(model, max_requests_kept=0)
        self._fake.script(None, self._fault)

    def _fault(self, request: ProviderRequest) -> Fault:
        _request.set(request)
        fault = self._draw(request)
        marks = {
            "x-soak-echo": request.headers["x-request-id"],
            "x-soak-from": f"{self._from}.{request.number}",
        }
        return dataclasses.replace(fault, headers={**fault.headers, **marks})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        await self._fake(scope, receive, _Watched(send, self.write_down) if scope["type"] == "http" else send)

    def write_down(self) -> None:
        """Enter the request that is being answered."""
        request = _request.get(None)
        if request is None or request.status != 200:
            return
        line = {
            "from": f"{self._from}.{request.number}",
            "id": request.headers["x-request-id"],
            "input": request.prompt_tokens,
            "output": 0 if request.dialect == "openai.embeddings" else request.tokens_sent,
        }
        self._ledger.write(json.dumps(line) + "\n")


class _Watched:
    """A server's `send`, with a word before the end of a body. The connection is broken through what it belongs to."""

    def __init__(self, send: Send, before_end: Callable[[], None]) -> None:
        self._send = send
        self._before_end = before_end
        self.__self__ = getattr(send, "__self__", None)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._before_end()
        await self._send(message)


async def _main(port: int, name: str, ledger: str, seed: int) -> None:
    with Path(ledger).open("a", buffering=1) as file:  # noqa: ASYNC230 - a line at a time
        async with serve(Provider(name, file, Random(seed)), port=port):
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_main, int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
