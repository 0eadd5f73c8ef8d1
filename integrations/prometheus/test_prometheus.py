"""Prometheus takes the configuration, and each alert fires when it should and not when it should not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from integrations.prometheus.app import TENANTS, create_app
from integrations.prometheus.live import FOLDER
from integrations.prometheus.server import program
from integrations.prometheus.traffic import TOKEN
from resilient_llm.testing import FakeProvider, serve_in_thread

CONFIG: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
TESTS: dict[str, Any] = yaml.safe_load((FOLDER / "rules_test.yml").read_text())
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def promtool(*arguments: str | Path) -> str:
    ran = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "gateway-token").write_text(TOKEN)
    for name in ("prometheus.yml", "rules.yml"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    assert "1 rule files found" in promtool("check", "config", tmp_path / "prometheus.yml")


def test_promtool_takes_the_rules() -> None:
    assert f"SUCCESS: {len(RULES)} rules found" in promtool(
        "check", "rules", "--lint=all", "--lint-fatal", FOLDER / "rules.yml"
    )


def test_each_alert_fires_when_it_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", FOLDER / "rules_test.yml")


def test_a_rule_that_is_wrong_is_found_out(tmp_path: Path) -> None:
    wrong = (FOLDER / "rules.yml").read_text().replace("> 0.05", "> 0.5")
    (tmp_path / "rules.yml").write_text(wrong)
    (tmp_path / "rules_test.yml").write_text((FOLDER / "rules_test.yml").read_text())
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", tmp_path / "rules_test.yml")


def test_the_numbers_are_those_of_the_requirements() -> None:
    asked = {name: (alert["expr"].split()[-2:], alert["for"]) for name, alert in ALERTS.items()}
    assert asked["LLMRetriesHigh"] == ([">", "0.2"], "5m")
    assert asked["LLMCircuitOpen"][1] == "1m"
    assert asked["LLMSuccessLow"] == ([">", "0.05"], "10m")


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_shown_to_fire_and_not_to_fire(name: str) -> None:
    shown = [
        bool(check["exp_alerts"])
        for test in TESTS["tests"]
        for check in test.get("alert_rule_test", [])
        if check["alertname"] == name
    ]
    assert True in shown
    assert False in shown


@pytest.mark.realtime
def test_a_service_shows_the_metrics_that_the_rules_go_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    app = create_app(FakeProvider().httpx2_transport())
    (job,) = (job for job in CONFIG["scrape_configs"] if job["job_name"] == "chat")
    with serve_in_thread(app) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for tenant in (*TENANTS, "somebody"):
            asked = client.post("/chat", json={"message": "?"}, headers={"x-tenant": tenant})
            assert asked.json()["text"]
        shown = client.get(job["metrics_path"])
    assert shown.status_code == 200
    samples = [sample for family in text_string_to_metric_families(shown.text) for sample in family.samples]
    calls = [s for s in samples if s.name == "gen_ai_client_operation_duration_seconds_count"]
    assert {s.labels["resilient_llm_tenant"]: s.value for s in calls} == {
        "acme": 1,
        "umbrella": 1,
        "other": 1,
    }
    assert {s.labels["resilient_llm_outcome"] for s in calls} == {"success"}
    assert {s.value for s in samples if s.name == "resilient_llm_canary_share"} == {0.05}


def test_what_a_collector_calls_a_ratio_is_called_as_everywhere_else() -> None:
    (job,) = (job for job in CONFIG["scrape_configs"] if job["job_name"] == "collector")
    (rename,) = job["metric_relabel_configs"]
    found = re.fullmatch(rename["regex"], "resilient_llm_breaker_state_ratio")
    assert found is not None
    assert rename["replacement"].replace("$1", found[1]) == "resilient_llm_breaker_state"
    assert re.fullmatch(rename["regex"], "resilient_llm_call_retries_total") is None
