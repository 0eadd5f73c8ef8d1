"""The manifests say what the code they run expects, and a pod that is told to end answers what it has begun."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.testing import FakeModel, FakeProvider, Latency, serve_in_thread
from tests.programs import answering
from tests.stores.cluster import wait_for
from tests.stores.conftest import Server, binary, free_port

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def manifests(name: str) -> dict[str, Any]:
    """Give what a file describes, by kind and name."""
    described = list(yaml.safe_load_all((FOLDER / name).read_text()))
    assert all(each["apiVersion"] and each["metadata"]["name"] for each in described)
    return {f"{each['kind']} {each['metadata']['name']}": each for each in described}


SERVICE = manifests("service.yaml")
STORE = manifests("store.yaml")
POD = SERVICE["Deployment chat"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
SERVER = STORE["Deployment store"]["spec"]["template"]["spec"]["containers"][0]


def option(name: str) -> str:
    words = [*CONTAINER["command"], *CONTAINER["args"]]
    value: str = words[words.index(name) + 1]
    return value


@pytest.mark.parametrize(("file", "name"), [("service.yaml", "chat"), ("store.yaml", "store")])
def test_what_belongs_together_has_the_same_labels_and_ports(file: str, name: str) -> None:
    described = manifests(file)
    deployment = described[f"Deployment {name}"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    service = described[f"Service {name}"]["spec"]
    assert service["selector"] == labels
    (container,) = deployment["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            (how,) = (container[probe][key] for key in ("httpGet", "tcpSocket") if key in container[probe])
            assert how["port"] in ports
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert "cpu" not in limits
    assert mebibytes(limits["memory"]) > mebibytes(requests["memory"])
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_selectors_across_manifests() -> None:
    labels = SERVICE["Deployment chat"]["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["PodDisruptionBudget chat"]["spec"]["selector"]["matchLabels"] == labels
    assert POD["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"] == labels
    (rule,) = STORE["NetworkPolicy store"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]
    scaled = SERVICE["HorizontalPodAutoscaler chat"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "chat"
    assert scaled["minReplicas"] == SERVICE["Deployment chat"]["spec"]["replicas"]


def test_a_pod_has_the_time_it_takes_to_end() -> None:
    before = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    server = int(option("--timeout-graceful-shutdown"))
    middleware = inspect.signature(ResilienceMiddleware).parameters["drain_timeout"].default
    store = 1.0
    # uvicorn waits for its connections before it tells the app, so that the middleware need not wait, as a rule.
    assert before + server + middleware + store <= POD["terminationGracePeriodSeconds"]
    assert server > 90  # the longest request: the deadline at the service's door
    readiness = CONTAINER["readinessProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= before


def test_the_store_fits_into_its_memory_and_is_one() -> None:
    conf = dict(
        line.split(maxsplit=1)
        for line in STORE["ConfigMap store"]["data"]["valkey.conf"].splitlines()
        if line
    )
    assert conf["maxmemory-policy"] == "noeviction"
    size = mebibytes(conf["maxmemory"].replace("mb", "Mi"))
    assert 1.25 * size <= mebibytes(SERVER["resources"]["requests"]["memory"])
    deployment = STORE["Deployment store"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (1, "Recreate")


@pytest.mark.realtime
def test_a_server_reads_the_configuration(tmp_path: Path) -> None:
    acl = (ROOT / "integrations" / "redis" / "resilient_llm.acl").read_text()
    (tmp_path / "users.acl").write_text(acl.replace("user default off", "user default on nopass ~* &* +@all"))
    conf = tmp_path / "valkey.conf"
    text = STORE["ConfigMap store"]["data"]["valkey.conf"]
    conf.write_text(text.replace("/acl/", f"{tmp_path}/").replace("bind * -::*", "bind 127.0.0.1"))
    server = Server("valkey9", tmp_path)
    server._command = [binary("valkey9"), str(conf), "--port", str(server.port), "--dir", str(tmp_path)]
    server.start()
    try:
        with server.admin as admin:
            assert admin.config_get("maxmemory")["maxmemory"] == str(256 * 1024 * 1024)
            assert len(admin.acl_list()) == 2
    finally:
        server.close()


def mebibytes(size: str) -> float:
    assert size.endswith("Mi")
    return float(size.removesuffix("Mi"))


# The command of the container, on this machine


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], FakeProvider]]:
    store = Server("valkey9", tmp_path)
    store.start()
    given: list[str] = CONTAINER["command"] + CONTAINER["args"]
    program, *words = ["127.0.0.1" if word == "0.0.0.0" else word for word in given]
    ready = CONTAINER["readinessProbe"]["httpGet"]["path"]
    url = ""

    def start() -> subprocess.Popen[bytes]:
        nonlocal url
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        here = [str(port) if word == "8000" else word for word in words]
        return subprocess.Popen(
            [sys.executable, "-m", program, *here, "--log-level", "warning"],
            cwd=ROOT,
            env=os.environ
            | {
                "STORE_URL": store.url,
                "OPENAI_API_KEY": "none",
                "OPENAI_BASE_URL": f"{provider}/v1",
            },
        )

    fake = FakeProvider(FakeModel(latency=Latency(headers=1.5)))
    try:
        with (
            serve_in_thread(fake) as provider,
            answering(start, lambda: answers(f"{url}{ready}")) as process,
        ):
            yield url, process, fake
    finally:
        store.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.realtime
def test_a_pod_that_ends_answers_what_it_has_begun(
    started: tuple[str, subprocess.Popen[bytes], FakeProvider],
) -> None:
    url, process, fake = started
    statuses: list[int] = []

    def ask() -> None:
        response = httpx.post(f"{url}/chat", json={"message": "?"}, headers={"x-tenant": "acme"}, timeout=60)
        statuses.append(response.status_code)

    asked = threading.Thread(target=ask)
    asked.start()
    wait_for(lambda: bool(fake.requests), "the request at the provider")
    process.send_signal(signal.SIGTERM)  # what follows preStop
    asked.join()
    assert statuses == [200]
    assert process.wait(timeout=60) in (0, -signal.SIGTERM)  # uvicorn raises the signal again at its end
