"""LiteLLM's SDK sees through a sidecar what it sees without, when its own retries are off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import anyio
import pytest

from resilient_llm.testing import Fault
from tests.pages import ROOT
from tests.sidecar.rest import calls_the_tool
from tests.sidecar.support import ANSWER, KEY
from tests.sidecar.twins import twins

pytestmark = [pytest.mark.anyio, pytest.mark.realtime, pytest.mark.long]

FAULTS = {
    "bad": Fault(status=400, code="unsupported_value"),
    "limited": Fault(status=429),
    "down": Fault(status=503),
}


def run(*urls: str) -> list[dict[str, Any]]:
    """Make the same calls of servers, and give what came of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sidecar.litellm_client", KEY, *urls],
        cwd=ROOT,
        # Without this it asks the network for prices when it is imported.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(urls) :]]


async def test_it_sees_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        ends.script(lambda request: FAULTS.get(request.model) or calls_the_tool(request))
        got, proxied = await anyio.to_thread.run_sync(run, ends.direct, ends.proxied)
        assert proxied == got
        assert ends.providers[0].total_requests == 10  # one for each call
    assert got["chat"]["choices"][0]["message"]["content"] == ANSWER
    assert got["stream"][-1]["usage"]["completion_tokens"] == 9
    [call] = got["tools"]["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert [len(each["embedding"]) for each in got["embedding"]["data"]] == [8, 8]
    assert got["anthropic"]["choices"][0]["message"]["content"] == ANSWER
    assert got["failures"] == {
        "bad": ["BadRequestError", 400],
        "limited": ["RateLimitError", 429],
        "down": ["ServiceUnavailableError", 503],
    }
