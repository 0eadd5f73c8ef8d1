"""The sidecar's manifest holds a file it reads, and its command and probes work as they stand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from benchmarks._children import Watch
from resilient_llm.sidecar.config import parse
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.stores.conftest import free_port

FOLDER = Path(__file__).parent
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "sidecar.yaml").read_text())}
FILE: str = MANIFESTS["ConfigMap"]["data"]["gateway.toml"]
POD: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(GATEWAY,) = POD["initContainers"]
(APP,) = POD["containers"]


def test_the_file_is_one_the_sidecar_reads_and_the_pod_has_what_it_names() -> None:
    config = parse(FILE)
    assert config.server.host == "127.0.0.1"
    environment = {each["name"] for each in GATEWAY["env"]}
    assert environment == {"STORE_URL", "OPENAI_API_KEY"}
    assert all(f'"{name}"' in FILE for name in environment)
    (mount,) = GATEWAY["volumeMounts"]
    assert GATEWAY["command"][-1] == f"{mount['mountPath']}/gateway.toml"
    assert POD["volumes"] == [{"name": mount["name"], "configMap": {"name": "gateway"}}]


def test_it_is_a_sidecar_that_outlives_the_app_and_has_time_to_drain() -> None:
    assert GATEWAY["restartPolicy"] == "Always"
    server = parse(FILE).server
    assert server.drain_timeout > server.deadline
    assert server.drain_timeout < POD["terminationGracePeriodSeconds"]


def test_the_app_asks_the_sidecar() -> None:
    url = urlsplit(next(each["value"] for each in APP["env"] if each["name"] == "OPENAI_BASE_URL"))
    server = parse(FILE).server
    assert (url.hostname, url.port, url.path) == (server.host, server.port, "/v1")


@pytest.mark.realtime
def test_command_and_probes_work_as_they_stand(tmp_path: Path) -> None:
    port = free_port()

    def here(text: str) -> str:
        return text.replace("8080", str(port))

    def probe(name: str) -> bool:
        python, *words = GATEWAY[name]["exec"]["command"]
        assert python == "python"
        done = subprocess.run(
            [sys.executable, *map(here, words)], check=False, capture_output=True, timeout=20
        )
        return done.returncode == 0

    with serve_in_thread(FakeProvider()) as upstream:
        file = tmp_path / "gateway.toml"
        file.write_text(f'{here(FILE)}url = "{upstream}/v1"\n')
        program, *words = GATEWAY["command"]
        assert program == "resilient-llm"
        environment = {"STORE_URL": "redis://127.0.0.1:1/0", "OPENAI_API_KEY": "sk-fake"}
        process = subprocess.Popen(
            [sys.executable, "-m", "resilient_llm.cli", *words[:-1], str(file)],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
        )
        watch = Watch(process)
        try:
            until = time.monotonic() + 30
            while not probe("startupProbe"):
                assert time.monotonic() < until
            assert probe("livenessProbe")
            # The store is not there: on_error = "local", and the app is answered all the same.
            ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=ask, timeout=20)
            assert reply.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
            assert not probe("livenessProbe")
        finally:
            watch.release()
            process.kill()
            process.wait()
