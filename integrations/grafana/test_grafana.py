"""Each query of the dashboard, and of the alert rules, run by a real Prometheus that has seen everything happen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from integrations.prometheus.live import scraped
from integrations.prometheus.server import Prometheus

DASHBOARD: dict[str, Any] = json.loads(Path(__file__).with_name("dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {
    variable["name"]: variable for variable in DASHBOARD["templating"]["list"]
}
QUERIES: list[tuple[str, str]] = [
    (f"{panel['title']}, {target['refId']}", target["expr"])
    for panel in PANELS
    for target in panel["targets"]
]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TIMES = {"__rate_interval": "5m", "__range": "1h"}
ALL = {"job": ".*", "tenant": ".*", "model": ".*"}
SOME = {"job": "(resilient-llm|chat)", "tenant": "(acme|umbrella)", "model": "(chat|slow|large)"}
"""What Grafana writes for values that are ticked."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraped(tmp_path_factory.mktemp("live")) as running:
        yield running


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """Put values in the place of variables, as Grafana does."""
    known = {**TIMES, **values}
    return re.sub(r"\$(\w+)", lambda found: known[found[1]], expression)


@pytest.mark.realtime
@pytest.mark.parametrize("values", [ALL, SOME], ids=["all", "some"])
def test_every_query_of_the_dashboard_gives_data(prometheus: Prometheus, values: dict[str, str]) -> None:
    empty = [name for name, query in QUERIES if not prometheus.query(filled_in(query, values))]
    assert empty == []


@pytest.mark.realtime
def test_every_query_of_the_rules_gives_data(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert len(rules) == 8
    assert {rule["name"]: (rule["health"], bool(prometheus.query(rule["query"]))) for rule in rules} == {
        rule["name"]: ("ok", True) for rule in rules
    }


@pytest.mark.realtime
def test_panels_tell_apart_what_happened(prometheus: Prometheus) -> None:
    def shown(title: str, *labels: str) -> set[tuple[str, ...]]:
        (query,) = (query for name, query in QUERIES if name == f"{title}, A")
        return {
            tuple(series["metric"].get(label, "") for label in labels)
            for series in prometheus.query(filled_in(query, ALL))
            if float(series["value"][1]) > 0
        }

    outcomes = {(word,) for word in ("success", "fallback", "failed", "rejected")}
    assert shown("Calls by outcome", "resilient_llm_outcome") == outcomes
    assert ("main/fast",) in shown("429s by target", "resilient_llm_attempt_target")
    statuses = shown("Attempts by target and status", "http_response_status_code")
    assert {("200",), ("400",), ("429",), ("503",)} <= statuses
    assert shown("Circuits", "resilient_llm_breaker_name") == {("circuit.main:main/broken",)}
    assert shown("Refusals by limit and reason", "resilient_llm_limiter_name", "resilient_llm_reason") == {
        ("bulkhead.umbrella", "bulkhead_full")
    }
    assert shown("Waits for limits", "resilient_llm_limiter_name", "resilient_llm_wait_outcome") == {
        ("bulkhead", "acquired")
    }
    assert {("acme",), ("umbrella",)} <= shown("Tokens by tenant", "resilient_llm_tenant")
    assert {("acme",), ("umbrella",)} == shown("Cost an hour by tenant", "resilient_llm_tenant")
    assert shown("Canaries", "resilient_llm_canary_model") == {("chat-next",)}
    assert shown("Stores", "resilient_llm_store_name") == {("redis",)}


@pytest.mark.realtime
def test_models_have_the_names_that_targets_give_them(prometheus: Prometheus) -> None:
    attempts = 'resilient_llm_attempt_duration_seconds_count{job="resilient-llm"}'
    named = prometheus.label_values("resilient_llm_attempt_model", attempts)
    assert set(named) == {"broken", "fast", "slow", "twin"}


@pytest.mark.realtime
def test_variables_offer_what_there_is(prometheus: Prometheus) -> None:
    offered = {}
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            offered[name] = set(prometheus.label_values(asked[2], filled_in(asked[1], ALL)))
    assert offered == {
        "job": {"resilient-llm", "chat"},
        "tenant": {"acme", "umbrella", "other"},
        "model": {"chat", "large", "slow"},
    }


def test_it_can_be_imported_anywhere() -> None:
    assert "id" not in DASHBOARD
    assert DASHBOARD["uid"]
    assert VARIABLES["datasource"] | {"type": "datasource", "query": "prometheus"} == VARIABLES["datasource"]
    for panel in PANELS:
        assert panel["datasource"] == DATASOURCE
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"])
    used = {name for _, query in QUERIES for name in re.findall(r"\$(\w+)", query)}
    assert used == {*TIMES, *VARIABLES} - {"datasource"}


def test_panels_have_names_and_units_of_their_own_and_room() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    for panel in PANELS:
        if panel["type"] != "state-timeline":
            assert panel["fieldConfig"]["defaults"]["unit"]
