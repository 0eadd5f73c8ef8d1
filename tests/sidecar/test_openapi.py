"""What the sidecar says of itself is so: schemathesis asks as its OpenAPI description says, and as it forbids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, settings

from resilient_llm.sidecar.asked import ROUTES
from resilient_llm.sidecar.openapi import description
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.sidecar.process import Process, started
from tests.sidecar.support import KEY

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = pytest.mark.realtime

TOKEN = "token-of-the-operators-0123456789"
GATEWAY = """
[server]
port = 0
[admin]
port = 0
token_env = "ADMIN_TOKEN"
[tenants.acme]
key_env = "KEY_OF_ACME"
[models.m]
targets = ["main"]
[models.new]
targets = ["main/new"]
[routing]
default = "m"
[canary.new]
model = "m"
candidate = "new"
"""
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
WITHOUT = [checks.ignored_auth, checks.negative_data_rejection]
"""The first takes another key that is right for none at all (see the test below); the second wants headers refused that
nobody has heard of, which a proxy passes on."""
UNKNOWN = ["/v1/completions", "/v1/messages/count_tokens"]
"""What the fake provider does not know."""

SCHEMA = schemathesis.openapi.from_dict(description())
CALLERS = SCHEMA.include(tag=["callers", "probes"]).exclude(path=UNKNOWN)
OPERATORS = SCHEMA.include(tag=["operators", "probes"])


class Running(NamedTuple):
    process: Process
    url: str
    admin: str


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("openapi") / "gateway.toml"
    with (
        pytest.MonkeyPatch.context() as patch,
        serve_in_thread(FakeProvider(max_requests_kept=0)) as upstream,
    ):
        patch.setenv("KEY_OF_ACME", KEY)
        patch.setenv("ADMIN_TOKEN", TOKEN)
        file.write_text(f'{GATEWAY}[targets.main]\nurl = "{upstream}/v1"\n')
        with started(file) as (process, url, admin):
            yield Running(process, url, admin)
    assert not [line for line in process.lines if line["level"] == "error"]


@CALLERS.parametrize()  # type: ignore[untyped-decorator]
@SETTINGS
def test_callers_get_what_is_described(case: Any, sidecar: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-timeout": "60"}
    case.call_and_validate(base_url=sidecar.url, headers=headers, excluded_checks=WITHOUT)


@OPERATORS.parametrize()  # type: ignore[untyped-decorator]
@SETTINGS
def test_operators_get_what_is_described(case: Any, sidecar: Running) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    case.call_and_validate(base_url=sidecar.admin, headers=headers, excluded_checks=WITHOUT)


@pytest.mark.parametrize("path", description()["paths"])
def test_nothing_but_probes_is_for_anybody(path: str, sidecar: Running) -> None:
    for method, operation in description()["paths"][path].items():
        url = sidecar.admin if "operators" in operation["tags"] else sidecar.url
        for key in ("", "Bearer of-something-else-0123456789"):
            there = url + path.replace("{", "").replace("}", "")
            reply = httpx.request(method, there, headers={"authorization": key}, timeout=60)
            assert reply.status_code == (200 if "probes" in operation["tags"] else 401)


def test_it_is_served_to_operators_only(sidecar: Running) -> None:
    shown = httpx.get(
        f"{sidecar.admin}/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}, timeout=60
    )
    assert shown.json() == json.loads(json.dumps(description()))
    elsewhere = httpx.get(
        f"{sidecar.url}/openapi.json", headers={"authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert elsewhere.status_code == 404


def test_every_path_that_is_proxied_is_described() -> None:
    assert set(description()["paths"]) > ROUTES
