"""`resilient-llm fake-provider` as a process: what it serves, and how it stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import ROOT, Start, read_until, stop

pytestmark = pytest.mark.realtime

CHAT = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


def base_url(process: subprocess.Popen[str]) -> str:
    read_until(process, "until Ctrl-C")
    openai, anthropic = read_until(process, "OpenAI").split()[1], read_until(process, "Anthropic").split()[1]
    assert openai == f"{anthropic}/v1"
    return anthropic


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_serves_both_apis_until_a_signal(start: Start, number: signal.Signals, code: int) -> None:
    provider = start("fake-provider", "--port", "0")
    url = base_url(provider)
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        chat = client.post("/v1/chat/completions", json=CHAT).json()
        message = client.post("/v1/messages", json=CHAT).json()
        assert chat["choices"][0]["message"]["content"] == message["content"][0]["text"] != ""
        assert stop(provider, number)[1].strip() == ""
        assert provider.returncode == code
        with pytest.raises(httpx.ConnectError):
            client.post("/v1/chat/completions", json=CHAT)


def test_stops_while_a_client_waits(start: Start) -> None:
    provider = start("fake-provider", "--port", "0", "--token-latency", "60")
    url = base_url(provider)
    request = {**CHAT, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=request, trust_env=False, timeout=60
    ) as response:
        assert response.status_code == 200
        assert stop(provider)[1].strip() == ""
        assert provider.returncode == 130


def test_limits_latency_and_faults(start: Start, tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('[{"status": 503}, {"status": 500, "headers": {"x-should-retry": "false"}}]')
    options = ["--rpm", "3", "--tpm", "100000", "--latency", "0.2", "--faults", str(faults)]
    provider = start("fake-provider", "--port", "0", *options)
    with httpx.Client(base_url=base_url(provider), trust_env=False, timeout=60) as client:
        replies = [client.post("/v1/chat/completions", json=CHAT) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [503, 500, 200, 429]
    assert replies[1].headers["x-should-retry"] == "false"
    assert replies[2].elapsed.total_seconds() >= 0.2
    assert float(replies[3].headers["retry-after"]) > 0
    stop(provider)


@pytest.mark.parametrize(("number", "code"), [("INT", 130), ("TERM", 143)])
def test_stops_when_a_shell_started_it_in_its_background(number: str, code: int, tmp_path: Path) -> None:
    # A shell starts what it puts into the background with SIGINT ignored.
    script = (
        f"'{sys.executable}' -m resilient_llm.cli fake-provider --port 0 >'{tmp_path}/said' & "
        f"child=$!; until grep -q 'until Ctrl-C' '{tmp_path}/said'; do sleep 0.1; done; "
        f"kill -{number} $child; wait $child"
    )
    assert subprocess.run(["sh", "-c", script], cwd=ROOT, timeout=100, check=False).returncode == code
