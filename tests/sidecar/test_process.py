"""`resilient-llm serve` as a process: it starts, reloads, drains and ends, and says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.support import ANSWER, ASK

PORTS = "[server]\nport = 0\ndrain_timeout = 5\n[admin]\nport = 0\n"


class Process:
    """A sidecar of its own, and the lines it writes."""

    def __init__(self, file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "resilient_llm.cli", "serve", "--config", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "default"},
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def wait_for(self, message: str, count: int = 1) -> dict[str, Any]:
        until = time.monotonic() + 40
        while time.monotonic() < until:
            found = [line for line in self.lines if line["message"].startswith(message)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.01)
        raise AssertionError(f"{message!r} was not logged: {self.lines}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        _, stderr = self._process.communicate(timeout=40)
        return self._process.returncode, stderr

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def started(file: Path) -> Iterator[tuple[Process, str, str]]:
    process = Process(file)
    try:
        line = process.wait_for("listening")
        yield process, line["url"], line["admin_url"]
    finally:
        process.kill()


def test_it_serves_reloads_drains_and_ends(tmp_path: Path) -> None:
    provider = FakeProvider()
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        file.write_text(f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\n')
        with started(file) as (process, url, admin):
            reply = httpx.post(f"{url}/v1/chat/completions", json=ASK)
            assert reply.json()["choices"][0]["message"]["content"] == ANSWER
            assert process.wait_for("request")["target"] == "one"
            assert "resilient_llm_attempt_duration_seconds_count" in httpx.get(f"{admin}/metrics").text

            file.write_text(f'{PORTS}[targets.two]\nurl = "{upstream}/v1"\nwieght = 2\n')
            process.signal(signal.SIGHUP)
            why = process.wait_for("the configuration was not reloaded")["message"]
            assert f"{file}:8: targets.two.wieght: unknown key" in why
            assert (
                httpx.post(f"{url}/v1/chat/completions", json=ASK).headers["x-resilient-llm-target"] == "one"
            )

            file.write_text(f'{PORTS}[targets.two]\nurl = "{upstream}/v1"\n')
            process.signal(signal.SIGHUP)
            process.wait_for("the configuration was reloaded")
            assert (
                httpx.post(f"{url}/v1/chat/completions", json=ASK).headers["x-resilient-llm-target"] == "two"
            )

            provider.script(None, [Fault(token_delay=0.15)])
            with httpx.stream("POST", f"{url}/v1/chat/completions", json={**ASK, "stream": True}) as stream:
                parts = stream.iter_raw()
                received = next(parts)
                process.signal(signal.SIGTERM)
                process.wait_for("draining")
                assert httpx.get(f"{admin}/readyz").status_code == 503
                received += b"".join(parts)
            assert received.endswith(b"data: [DONE]\n\n")
            code, stderr = process.end()
    assert (code, stderr) == (0, "")
    assert not [
        line for line in process.lines if line["level"] == "error" and "reloaded" not in line["message"]
    ]


def test_reloads_under_load_lose_no_request(tmp_path: Path) -> None:
    provider = FakeProvider(max_requests_kept=0)
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        texts = [f'{PORTS}[targets.{name}]\nurl = "{upstream}/v1"\n' for name in ("one", "two")]
        file.write_text(texts[0])

        def client(url: str) -> list[tuple[int, str]]:
            with httpx.Client() as http:
                replies = [http.post(f"{url}/v1/chat/completions", json=ASK) for _ in range(60)]
            return [(reply.status_code, reply.headers["x-resilient-llm-target"]) for reply in replies]

        with started(file) as (process, url, _), ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(client, url) for _ in range(6)]
            for number in range(1, 9):
                process.wait_for("request", 40 * number)
                file.write_text(texts[number % 2])
                process.signal(signal.SIGHUP)
                process.wait_for("the configuration was reloaded", number)
            answers = [answer for each in clients for answer in each.result(30)]
            process.wait_for("request", 360)
            process.signal(signal.SIGTERM)
            assert process.end()[0] == 0
    assert {status for status, _ in answers} == {200}
    assert {target for _, target in answers} == {"one", "two"}
    logged = [line for line in process.lines if line["message"] == "request"]
    assert len(logged) == len(answers) == 360
    assert len({line["request_id"] for line in logged}) == 360


def test_draining_has_a_limit(tmp_path: Path) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(stall_after_tokens=2)])
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        file.write_text(f'{PORTS.replace("= 5", "= 1")}[targets.one]\nurl = "{upstream}/v1"\n')
        with (
            started(file) as (process, url, _),
            httpx.stream("POST", f"{url}/v1/chat/completions", json={**ASK, "stream": True}) as stream,
        ):
            parts = stream.iter_raw()  # kept, or the response would be closed with it
            next(parts)
            began = time.monotonic()
            process.signal(signal.SIGTERM)
            code, _stderr = process.end()
            took = time.monotonic() - began
    assert code == 0
    assert 0.9 < took < 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[targets.a]\n", "gateway.toml:1: targets.a = {}: a target needs a url"),
        ('[targets.a]\nurl = "http://x/v1"\napi_key_env = "NOT_THERE"\n', "NOT_THERE is not set"),
        ('[targets.a]\nurl = "http://x/v1"\n[server]\nhost = "192.0.2.1"\nopen = true\n', "cannot listen"),
    ],
)
def test_it_does_not_start_with_what_cannot_work(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    code, stderr = Process(file).end()
    assert code == 1
    assert why in stderr
    assert "Traceback" not in stderr


def test_check_config_and_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[targets.a]\nurl = "http://x/v1"\napi_key_env = "NOT_THERE"\n')
    command = [sys.executable, "-m", "resilient_llm.cli"]
    wrong = subprocess.run([*command, "check-config", str(file)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert f"{file}:3: targets.a.api_key_env: the environment variable NOT_THERE is not set" in wrong.stderr
    right = subprocess.run(
        [*command, "check-config", "--no-env", str(file)], capture_output=True, text=True, check=True
    )
    assert right.stdout.startswith(f"{file}: OK\n")
    schema = subprocess.run([*command, "config-schema"], capture_output=True, text=True, check=True)
    assert json.loads(schema.stdout)["title"] == "Config"
