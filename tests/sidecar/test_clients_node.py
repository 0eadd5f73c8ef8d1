"""OpenAI's client for Node sees through a sidecar what it sees without.

It is installed once, of exactly one version, into a cache outside the repository; where that cannot be done, without
Node or without a network, the test is skipped and says why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilient_llm.testing import Fault
from tests.sidecar.rest import calls_the_tool
from tests.sidecar.support import ANSWER, KEY
from tests.sidecar.twins import twins

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

PROGRAM = Path(__file__).parent / "node"
FAULTS = {
    "bad": Fault(status=400, code="unsupported_value"),
    "limited": Fault(status=429),
    "down": Fault(status=503),
    "breaks": Fault(error_event_at=3, status=500, token_delay=0.02),
}


def _installed() -> Path:
    """Give a folder with the client and the program in it."""
    [(name, version)] = json.loads((PROGRAM / "package.json").read_text())["dependencies"].items()
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no Node")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "resilient_llm" / f"npm-{name}-{version}"
    if not (folder / "node_modules" / name / "package.json").exists():
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        made.mkdir(parents=True)
        shutil.copy(PROGRAM / "package.json", made)
        command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            shutil.rmtree(made)
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            pytest.skip(f"npm cannot install {name} {version}: {last[0]}")
        if folder.exists():  # another process was quicker
            shutil.rmtree(made)
        else:
            made.rename(folder)
    shutil.copy(PROGRAM / "client.mjs", folder)
    return folder


def _run(folder: Path, url: str) -> dict[str, Any]:
    command = ["node", "client.mjs", f"{url}/v1", KEY]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    got: dict[str, Any] = json.loads(done.stdout)
    return got


async def test_it_sees_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = await anyio.to_thread.run_sync(_installed)
    async with twins(monkeypatch) as ends:
        ends.script(lambda request: FAULTS.get(request.model) or calls_the_tool(request))
        got = await ends.same(lambda url: anyio.to_thread.run_sync(_run, folder, url))
    assert got["chat"]["choices"][0]["message"]["content"] == ANSWER
    assert got["stream"][-1]["usage"]["completion_tokens"] == 9
    [call] = got["tools_streamed"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert got["response_streamed"][-1]["type"] == "response.completed"
    assert {model: each[:2] for model, each in got["failures"].items()} == {
        "bad": ["BadRequestError", 400],
        "limited": ["RateLimitError", 429],
        "down": ["InternalServerError", 503],
        "breaks": ["APIError", None],
    }
