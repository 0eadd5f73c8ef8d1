"""`resilient-llm serve` as a process: it starts, reloads, drains and ends, and says what is wrong."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.process import PORTS, Gate, Process, started, until
from tests.sidecar.support import ANSWER, ASK

pytestmark = pytest.mark.realtime

KIND = [(b"content-type", b"application/json")]
LARGE = json.dumps({"choices": [{"finish_reason": "stop", "message": {"content": "x" * 3_500_000}}]}).encode()
"""More than is held of it by the system for a client that does not read."""


def test_it_serves_reloads_drains_and_ends(tmp_path: Path) -> None:
    provider = Gate(FakeProvider())
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        file.write_text(f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\n')
        with started(file) as (process, url, admin):
            reply = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60)
            assert reply.json()["choices"][0]["message"]["content"] == ANSWER
            assert process.wait_for("request")["target"] == "one"
            assert (
                "resilient_llm_attempt_duration_seconds_count"
                in httpx.get(f"{admin}/metrics", timeout=60).text
            )

            file.write_text(f'{PORTS}[targets.two]\nurl = "{upstream}/v1"\nwieght = 2\n')
            process.signal(signal.SIGHUP)
            why = process.wait_for("the configuration was not reloaded")["message"]
            assert f"{file}:8: targets.two.wieght: unknown key" in why
            assert (
                httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60).headers[
                    "x-resilient-llm-target"
                ]
                == "one"
            )

            file.write_text(f'{PORTS}[targets.two]\nurl = "{upstream}/v1"\n')
            process.signal(signal.SIGHUP)
            process.wait_for("the configuration was reloaded")
            assert (
                httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60).headers[
                    "x-resilient-llm-target"
                ]
                == "two"
            )

            with httpx.stream(
                "POST", f"{url}/v1/chat/completions", json={**ASK, "stream": True}, timeout=60
            ) as stream:
                parts = stream.iter_raw()
                received = next(parts)
                process.signal(signal.SIGTERM)
                process.wait_for("draining")
                assert httpx.get(f"{admin}/readyz", timeout=60).status_code == 503
                provider.open()
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
            with httpx.Client(timeout=60) as http:
                replies = [http.post(f"{url}/v1/chat/completions", json=ASK) for _ in range(60)]
            return [(reply.status_code, reply.headers["x-resilient-llm-target"]) for reply in replies]

        with started(file) as (process, url, _), ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(client, url) for _ in range(6)]
            for number in range(1, 9):
                process.wait_for("request", 40 * number)
                file.write_text(texts[number % 2])
                process.signal(signal.SIGHUP)
                process.wait_for("the configuration was reloaded", number)
            answers = [answer for each in clients for answer in each.result(60)]
            process.wait_for("request", 360)
            process.signal(signal.SIGTERM)
            assert process.end()[0] == 0
    assert {status for status, _ in answers} == {200}
    assert {target for _, target in answers} == {"one", "two"}
    logged = [line for line in process.lines if line["message"] == "request"]
    assert len(logged) == len(answers) == 360
    assert len({line["request_id"] for line in logged}) == 360


@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_draining_has_a_limit(options: tuple[str, ...], tmp_path: Path) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(stall_after_tokens=2)])
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        file.write_text(f'{PORTS.replace("= 50", "= 1")}[targets.one]\nurl = "{upstream}/v1"\n')
        with (
            started(file, *options) as (process, url, _),
            httpx.stream(
                "POST", f"{url}/v1/chat/completions", json={**ASK, "stream": True}, timeout=60
            ) as stream,
        ):
            parts = stream.iter_raw()  # kept, or the response would be closed with it
            next(parts)
            began = time.monotonic()
            process.signal(signal.SIGTERM)
            code, _stderr = process.end()
            took = time.monotonic() - began
    assert code == 0
    assert 0.9 < took < 30
    defects = [line for line in process.lines if "exception" in line]
    assert not defects  # it is no defect, and the access log has it


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_that_its_client_has_not_taken_when_draining_is_over_was_cut(
    version: str, tmp_path: Path
) -> None:
    async def large(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": KIND})
        await send({"type": "http.response.body", "body": LARGE})

    file = tmp_path / "gateway.toml"
    with serve_in_thread(large) as upstream:
        ports = PORTS.replace("= 50", "= 1")
        file.write_text(f'{ports}[targets.one]\nurl = "{upstream}/v1"\n')
        with started(file) as (process, url, _), socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            host, _, port = url.removeprefix("http://").partition(":")
            client.connect((host, int(port)))
            body = json.dumps(ASK).encode()
            head = (
                f"POST /v1/chat/completions HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(body)}"
            )
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            assert client.recv(8) == b"HTTP/1.1"
            process.signal(signal.SIGTERM)
            assert process.end() == (0, "")
            entry = process.wait_for("request")
            assert (entry["status"], entry["error"]) == (200, "shutting_down")
            assert entry["outcome"] == "error"
            received = 8
            with suppress(ConnectionResetError):
                while part := client.recv(1 << 20):
                    received += len(part)
                assert version == "1.1"  # by HTTP/1.0 that would be the end of the answer
            assert received < len(LARGE)


def test_who_has_no_answer_when_draining_is_over_is_told_so(tmp_path: Path) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(delay_headers=math.inf)])
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        file.write_text(f'{PORTS.replace("= 50", "= 1")}[targets.one]\nurl = "{upstream}/v1"\n')
        with started(file) as (process, url, _), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=ASK, timeout=60)
            until(lambda: bool(provider.requests))
            process.signal(signal.SIGTERM)
            answered = asked.result(60)
            assert process.end()[0] == 0
    assert answered.status_code == 503
    assert answered.json()["error"]["code"] == "shutting_down"
    entry = process.wait_for("request")
    assert (entry["status"], entry["error"], entry["outcome"]) == (503, "shutting_down", "cancelled")
    assert not [line for line in process.lines if "exception" in line]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[targets.a]\n", "gateway.toml:1: targets.a = {}: a target needs a url"),
        ('[targets.a]\nurl = "http://x/v1"\napi_key_env = "NOT_THERE"\n', "NOT_THERE is not set"),
        (
            '[targets.a]\nurl = "http://x/v1"\n[server]\nhost = "192.0.2.1"\nopen = true\n',
            "cannot listen on 192.0.2.1, port 8080: ",
        ),
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


def test_a_reload_asked_for_before_it_listens_does_not_end_it_and_is_done_then(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("[targets.a]\n")
    program = (
        "import os, signal, sys\n"
        "from resilient_llm.cli.program import run\n"
        "from resilient_llm.sidecar import config\n"
        "load = config.load\n"
        "def hung_up(path):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    return load(path)\n"
        "config.load = hung_up\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "serve", "--config", str(file)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "targets.a = {}: a target needs a url" in done.stderr

    for workers in (1, 2):
        ports = PORTS.replace("[server]", f"[server]\nworkers = {workers}")
        file.write_text(f'{ports}[targets.a]\nurl = "http://127.0.0.1:9/v1"\n')
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            messages = (json.loads(line)["message"] for line in process.stdout)
            assert "the configuration was reloaded" in messages  # as soon as somebody listened to it
            process.terminate()
            deque(messages, maxlen=0)
        assert process.returncode == 0
