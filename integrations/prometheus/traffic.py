"""A sidecar with everything that its metrics tell of: calls of two tenants that go well, and ones that do not.

The provider is a fake one, the sidecar a process of its own. `Traffic.round` makes each thing happen once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx

from benchmarks._children import Watch
from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.stores.conftest import Server

__all__ = ["TOKEN", "Traffic", "flowing", "sidecar"]

TOKEN: Final = "token-of-an-operator"
_KEYS: Final = {"acme": "key-of-acme-0123456789", "umbrella": "key-of-umbrella-0123456789"}
_SLOW = Fault(delay_headers=1.0)
_START_TIMEOUT = 60.0
_STORE_TIMEOUT = 30.0

_GATEWAY: Final = """
server = {{ port = 0, deadline = 60 }}
admin = {{ port = 0, token_env = "ADMIN_TOKEN" }}
store = {{ redis_env = "STORE_URL", on_error = "local", timeout = 5 }}
bulkhead = {{ max_concurrent = 2, max_queued = 20 }}
quota = {{ requests_per_minute = 6_000 }}
cache = {{ ttl = 600 }}
hedge = {{ delay = 0.3, budget_ratio = 1.0 }}
retry = {{ backoff = {{ initial = 0.01 }}, budget_min_per_second = 100 }}

[tenants.acme]
key_env = "ACME_KEY"
[tenants.umbrella]
key_env = "UMBRELLA_KEY"
bulkhead = {{ max_concurrent = 1, max_queued = 0 }}

[targets.main]
url = "{upstream}/v1"
price = {{ input = 2.5, output = 10 }}
circuit = {{ consecutive_failures = 3, break_duration = 600, max_break_duration = 600 }}
[targets.spare]
url = "{upstream}/v1"
price = {{ input = 2.5, output = 10 }}

[models.chat]
targets = ["main/fast", "spare/twin"]
[models.slow]
targets = ["main/slow"]
[models.large]
targets = ["main/broken"]
fallbacks = ["chat"]
"""


class Traffic:
    """Ask a sidecar: `url` takes calls, `admin` has /metrics."""

    def __init__(self, provider: FakeProvider, store: Server, *, url: str, admin: str) -> None:
        self.admin = admin
        self._provider = provider
        self._store = store
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._asked = 0

    def metrics(self) -> str:
        """Give what Prometheus is given."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"{self.admin}/metrics", headers=headers, timeout=30, trust_env=False)
        return answer.raise_for_status().text

    def round(self) -> None:
        """Have calls answered, kept, retried, hedged, sent to another model, cut off, queued and refused; try keys."""
        assert self._ask("chat").status_code == 200
        assert self._ask("chat", stream=True).status_code == 200
        assert [self._ask("chat", "the same").status_code for _ in range(2)] == [200, 200]
        for model, status in (("fast", 429), ("twin", 503)):
            self._provider.script(model, [Fault(status=status)])
        assert self._ask("chat").status_code == 200
        for model in ("fast", "twin"):
            self._provider.script(model, [Fault(delay_headers=0.6)])
        assert self._ask("chat").status_code == 200
        self._provider.script("broken", lambda _request: Fault(status=500))
        assert self._ask("large").status_code == 200
        self._provider.script("slow", [Fault(cut_after_tokens=3)])
        assert b"[DONE]" not in self._ask("slow", stream=True).content
        self._provider.script("slow", [Fault(status=400)])
        assert self._ask("slow").status_code == 400
        for _ in range(150):
            assert self._client.post("/v1/chat/completions", json={}).status_code == 401
        self._crowd()

    def _crowd(self) -> None:
        """Have four calls of a tenant that may have two at once, and three of one that may have one and no queue.

        Again where the machine was so slow that they did not meet.
        """
        for _ in range(3):
            self._provider.script("slow", [_SLOW] * 7)
            with ThreadPoolExecutor(7) as pool:
                statuses = list(pool.map(self._status, ["acme"] * 4 + ["umbrella"] * 3))
            self._provider.script("slow", [])
            assert set(statuses) <= {200, 429}
            if 429 in statuses:
                return
        raise AssertionError("nobody was refused")

    def _status(self, tenant: str) -> int:
        return self._ask("slow", tenant=tenant).status_code

    def lose_the_store(self) -> None:
        """Kill the store, and ask until the sidecar has given up on it."""
        self._store.kill()
        until = time.monotonic() + _STORE_TIMEOUT
        while 'resilient_llm_store_state{resilient_llm_store_name="redis"} 1.0' not in self.metrics():
            assert time.monotonic() < until, "the sidecar has not given up on a store that is gone"
            self._ask("large")

    def close(self) -> None:
        """Close the connections to it."""
        self._client.close()

    def _ask(
        self, model: str, question: str | None = None, *, tenant: str = "acme", stream: bool = False
    ) -> httpx.Response:
        self._asked += 1
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question or f"question {self._asked}"}],
            "stream": stream,
            "temperature": 0,  # a reply that may be kept
        }
        headers = {"authorization": f"Bearer {_KEYS[tenant]}"}
        parts: list[bytes] = []
        with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            try:
                parts.extend(response.iter_raw())
            except httpx.RemoteProtocolError:
                if not stream:  # one that is cut off is not passed off as complete
                    raise
        return httpx.Response(response.status_code, content=b"".join(parts))


@contextmanager
def flowing(folder: Path) -> Iterator[Traffic]:
    """Run a sidecar, its store and its provider. Skips the test where there is no store's program."""
    with ExitStack() as stack:
        store = Server("valkey9", folder)
        stack.callback(store.close)
        store.start()
        provider = FakeProvider(max_requests_kept=0)
        upstream = stack.enter_context(serve_in_thread(provider))
        file = folder / "gateway.toml"
        file.write_text(_GATEWAY.format(upstream=upstream))
        environment = {f"{tenant.upper()}_KEY": key for tenant, key in _KEYS.items()} | {
            "STORE_URL": store.url,
            "ADMIN_TOKEN": TOKEN,
        }
        url, admin = stack.enter_context(sidecar(file, environment))
        traffic = Traffic(provider, store, url=url, admin=admin)
        stack.callback(traffic.close)
        yield traffic


@contextmanager
def sidecar(file: Path, environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Run a sidecar; give its URL and its admin listener's. Raises RuntimeError if it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "resilient_llm.cli", "serve", "--config", str(file)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watch = Watch(process)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        yield _listening(process, lines)
    finally:
        watch.release()
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def _read(stream: Iterator[str], lines: list[str]) -> None:
    lines.extend(stream)  # as they come


def _listening(process: subprocess.Popen[str], lines: list[str]) -> tuple[str, str]:
    until = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < until and process.poll() is None:
        for line in lines.copy():
            if line.startswith("{") and (entry := json.loads(line))["message"] == "listening":
                return entry["url"], entry["admin_url"]
        time.sleep(0.05)
    raise RuntimeError(f"the sidecar does not listen: {''.join(lines)[-2000:]}")
