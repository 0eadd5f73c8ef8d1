"""The sidecar's manifest holds a file it reads, and its command and probes work as they stand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from integrations.prometheus.server import program
from resilient_llm.sidecar.config import parse
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.programs import answering
from tests.stores.conftest import free_port

FOLDER = Path(__file__).parent
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "sidecar.yaml").read_text())}
FILE: str = MANIFESTS["ConfigMap"]["data"]["gateway.toml"]
POD: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(GATEWAY,) = POD["initContainers"]
(APP,) = POD["containers"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
TOKEN = "token-of-an-operator"


def test_the_file_is_one_the_sidecar_reads_and_the_pod_has_what_it_names() -> None:
    config = parse(FILE)
    assert config.server.host == "127.0.0.1"
    environment = {each["name"] for each in GATEWAY["env"]}
    assert environment == {"STORE_URL", "OPENAI_API_KEY", "ADMIN_TOKEN"}
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


def test_probes_and_prometheus_come_to_the_admin_listener(tmp_path: Path) -> None:
    admin = parse(FILE).admin
    (port,) = GATEWAY["ports"]
    assert (admin.host, admin.port) == ("0.0.0.0", port["containerPort"])
    assert {GATEWAY[name]["httpGet"]["port"] for name in PROBES} == {port["name"]}
    text = (FOLDER / "scrape.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (chosen,) = (rule for rule in job["relabel_configs"] if rule.get("action") == "keep")
    assert chosen["regex"] == port["name"]
    assert Path(job["authorization"]["credentials_file"]).name == next(
        each["valueFrom"]["secretKeyRef"]["key"] for each in GATEWAY["env"] if each["name"] == "ADMIN_TOKEN"
    )
    (tmp_path / "admin-token").write_text(TOKEN)
    text = text.replace("/etc/prometheus/secrets/chat", str(tmp_path))
    # Debian's programs are built without Kubernetes; the rest is looked at.
    found = "kubernetes_sd_configs:\n      - role: pod\n"
    assert found in text
    (tmp_path / "scrape.yml").write_text(text.replace(found, "static_configs: []\n"))
    ran = subprocess.run(
        [program("promtool"), "check", "config", tmp_path / "scrape.yml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_it_has_no_rights_and_a_bound_of_memory() -> None:
    rights = GATEWAY["securityContext"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["readOnlyRootFilesystem"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["runAsNonRoot"]
    limits, requests = (GATEWAY["resources"][kind] for kind in ("limits", "requests"))
    assert set(limits) == {"memory"}
    assert set(requests) == {"cpu", "memory"}


@pytest.mark.realtime
def test_command_and_probes_work_as_they_stand(tmp_path: Path) -> None:
    port = admin = 0
    command, *words = GATEWAY["command"]
    assert command == "resilient-llm"
    environment = {
        "STORE_URL": "redis://127.0.0.1:1/0",
        "OPENAI_API_KEY": "sk-fake",
        "ADMIN_TOKEN": TOKEN,
    }

    def start() -> subprocess.Popen[bytes]:
        nonlocal port, admin
        port, admin = free_port(), free_port()
        file = tmp_path / "gateway.toml"
        text = FILE.replace("8080", str(port)).replace("8081", str(admin))
        file.write_text(f'{text}url = "{upstream}/v1"\n')
        return subprocess.Popen(
            [sys.executable, "-m", "resilient_llm.cli", *words[:-1], str(file)],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
        )

    def probe(name: str) -> bool:
        path = GATEWAY[name]["httpGet"]["path"]
        try:
            return httpx.get(f"http://127.0.0.1:{admin}{path}", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    with (
        serve_in_thread(FakeProvider()) as upstream,
        answering(start, lambda: probe("startupProbe")) as process,
    ):
        assert all(probe(name) for name in PROBES)
        # The store is not there: on_error = "local", and the app is answered all the same.
        ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
        assert httpx.get(f"http://127.0.0.1:{admin}/metrics", timeout=60).status_code == 401
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=ask, timeout=60)
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert not probe("livenessProbe")
