"""The same call to a provider and to a sidecar in front of the provider's twin: what is the same must be equal.

Twins number and date their replies alike, so nothing of a reply need be left out of a comparison. Each takes only its
own key: the client's must not come through the sidecar, and the provider's must be put in.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import pytest

from resilient_llm.testing import FakeProvider, Fault, serve
from tests.sidecar.rest import Rest
from tests.sidecar.support import KEY, Log, logged, over_sockets

PROVIDER_KEY = "sk-of-the-provider"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say what the weather is like.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A picture of one pixel, as base64 of a PNG."""
SEEING: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        ],
    }
]

T = TypeVar("T")


class Failure(NamedTuple):
    """An exception, as far as it tells of the reply it was made from."""

    type: type[BaseException]
    status: int | None
    message: str


@dataclass
class Twins:
    """A provider, and a sidecar in front of one that is the same."""

    direct: str
    proxied: str
    providers: tuple[FakeProvider, FakeProvider]
    """Asked directly, and by the sidecar."""
    log: Log

    def script(self, faults: Callable[[Any], Fault] | Iterable[Fault]) -> None:
        """Have both go wrong alike."""
        faults = faults if callable(faults) else list(faults)
        for provider in self.providers:
            provider.script(None, faults)

    async def same(self, call: Callable[[str], Awaitable[T]]) -> T:
        """Make a call of the base URL of both, and give what comes of it, which has to be the same."""
        direct, proxied = await call(self.direct), await call(self.proxied)
        assert proxied == direct
        return direct

    async def same_failure(self, call: Callable[[str], Awaitable[object]]) -> Failure:
        """Make a call that fails of both, and give the failure, which has to be the same."""
        direct, proxied = await failure(call, self.direct), await failure(call, self.proxied)
        assert proxied == direct
        return direct

    async def same_failure_after(self, fault: Fault, call: Callable[[str], Awaitable[object]]) -> Failure:
        """Make a call whose stream fails after content; again, more slowly, where that had not come through before.

        A failure that is wrong is so at every pace.
        """
        for delay in (0.02, 0.3, 2.0):
            self.script([replace(fault, token_delay=delay)])
            try:
                return await self.same_failure(call)
            except AssertionError as error:
                wrong = error
        raise wrong

    def asked_alike(self) -> Any:
        """Give what was asked of both last, which has to be the same to the byte."""
        direct, proxied = (provider.requests[-1] for provider in self.providers)
        assert (proxied.path, proxied.raw_body) == (direct.path, direct.raw_body)
        assert proxied.headers["content-type"] == direct.headers["content-type"]
        return direct.body


async def failure(call: Callable[[str], Awaitable[object]], url: str) -> Failure:
    """Make a call that has to fail."""
    try:
        got = await call(url)
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        said = re.sub(r"req_\w+", "req_", str(error))  # the id of the request, which may be that of a retry
        return Failure(type(error), getattr(error, "status_code", None), said)
    raise AssertionError(f"nothing failed, and there came {got!r}")


def _now() -> float:
    return 1_790_000_000.0


@asynccontextmanager
async def twins(environment: pytest.MonkeyPatch, more: str = "") -> AsyncIterator[Twins]:
    """Serve everything, with a sidecar that retries at once; `more` is added to its configuration."""
    environment.setenv("CLIENT_KEY", KEY)
    environment.setenv("PROVIDER_KEY", PROVIDER_KEY)
    direct = FakeProvider(api_keys=[KEY], wall_clock=_now)
    behind = FakeProvider(api_keys=[PROVIDER_KEY], wall_clock=_now)
    async with serve(Rest(direct, KEY)) as first, serve(Rest(behind, PROVIDER_KEY)) as second:
        toml = f"""
        [tenants.acme]
        key_env = "CLIENT_KEY"
        [targets.openai]
        url = "{second}/v1"
        dialect = "openai"
        api_key_env = "PROVIDER_KEY"
        passthrough = true
        [targets.anthropic]
        url = "{second}"
        dialect = "anthropic"
        provider = "anthropic"
        api_key_env = "PROVIDER_KEY"
        [targets.gemini]
        url = "{second}"
        dialect = "gemini"
        provider = "google"
        api_key_env = "PROVIDER_KEY"
        passthrough = true
        [retry]
        backoff = {{initial = 0.01, maximum = 0.02}}
        {more}
        """
        with logged() as log:
            async with over_sockets(toml) as (url, _):
                yield Twins(first, url, (direct, behind), log)
