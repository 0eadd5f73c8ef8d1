"""How tests of the lab send requests to a network without any policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import anyio

from resilient_llm import Request
from resilient_llm.lab import URL, Network
from resilient_llm.message import Reply


class Received(NamedTuple):
    """What a client received, and how many seconds it took."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    first: float
    """Until the first bytes of the body."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    *, url: str = URL, path: str = "/chat/completions", key: str = "key", **fields: object
) -> Request:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "x" * 400}], **fields}
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + key.encode())]
    return Request("POST", url + path, headers, json.dumps(body).encode())


async def send(network: Network, **fields: Any) -> Received:
    """Send a request and read the reply to its end."""
    began = anyio.current_time()
    return await receive(await network(request(**fields)), began)


async def receive(reply: Reply, began: float) -> Received:
    first = float("nan")
    body = b""
    async for chunk in reply.stream:
        first = first if body else anyio.current_time() - began
        body += chunk
    await reply.stream.aclose()
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Received(reply.status, headers, body, anyio.current_time() - began, first)
