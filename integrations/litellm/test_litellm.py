"""LiteLLM on both sides of a sidecar at once, over real sockets: its SDK asks the sidecar, which asks its router."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from resilient_llm.testing import FakeProvider, Fault, ProviderRequest, serve
from tests.pages import ROOT
from tests.sidecar.support import Log, logged, over_sockets

pytestmark = [pytest.mark.anyio, pytest.mark.realtime, pytest.mark.long]

FOX = "The quick brown fox jumps over the lazy dog."
DOWN = "Are you there?"
FILE = (Path(__file__).parent / "gateway.toml").read_text()


def environment(**more: str) -> dict[str, str]:
    """Give the environment of a program: without the first of these it asks the network for prices."""
    return {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}


@contextmanager
def router(provider: str) -> Iterator[str]:
    """Run LiteLLM's router in front of a provider, and give its URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "integrations.litellm.app"],
        cwd=ROOT,
        env=environment(OPENAI_API_KEY="none", OPENAI_BASE_URL=f"{provider}/v1"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def ask(url: str) -> str:
    """Ask a sidecar a question that is answered and one that is not, and give what is printed."""
    done = subprocess.run(
        [sys.executable, "-m", "integrations.litellm.chat", "?", DOWN],
        cwd=ROOT,
        env=environment(GATEWAY_URL=url, GATEWAY_KEY="none"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_both_ways_one_layer_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_MASTER_KEY", "sk-of-the-proxy")
    provider = FakeProvider()
    async with serve(provider) as upstream:
        running = router(upstream)
        url = await anyio.to_thread.run_sync(running.__enter__)
        try:
            toml = FILE.replace("http://127.0.0.1:4000", url)
            assert toml != FILE
            with logged() as log:
                async with over_sockets(f"{toml}[retry]\nbackoff = {{initial = 0.01}}\n") as (sidecar, _):
                    await _is_answered(sidecar, provider, log)
        finally:
            await anyio.to_thread.run_sync(running.__exit__, None, None, None)


async def _is_answered(sidecar: str, provider: FakeProvider, log: Log) -> None:
    passing = iter([Fault(status=503), Fault(), Fault(status=503)])

    def fault(request: ProviderRequest) -> Fault:
        is_down = DOWN.encode() in request.raw_body
        return Fault(status=503) if is_down else next(passing, Fault())

    provider.script(None, fault)
    printed = await anyio.to_thread.run_sync(ask, sidecar)
    assert printed == f"in one piece: {FOX}\nas a stream: {FOX}\nunavailable: 503\n"
    await log.entry(3)
    assert [entry["attempts"] for entry in log.entries] == [2, 2, 3]
    assert provider.total_requests == 2 + 2 + 3  # as the sidecar tries, and not once more
