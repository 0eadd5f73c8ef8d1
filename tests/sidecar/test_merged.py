"""What several workers report, made into one report."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from resilient_llm.sidecar.check import notes
from resilient_llm.sidecar.config import parse
from resilient_llm.sidecar.merged import one_health, one_text

PAGE = """# HELP calls_total Calls
# TYPE calls_total counter
calls_total{target="a b{c}"} %d
# HELP share Share
# TYPE share gauge
share %d
"""


def test_every_sample_says_whose_it_is() -> None:
    text = one_text({1: PAGE % (1, 2), 3: PAGE % (3, 4) + "# TYPE more gauge\nmore 5\n"}, {1: 0, 2: 7, 3: 1})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {
        name: [(sample.labels, sample.value) for sample in family.samples]
        for name, family in families.items()
    }
    assert found == {
        "calls": [({"worker": "1", "target": "a b{c}"}, 1), ({"worker": "3", "target": "a b{c}"}, 3)],
        "share": [({"worker": "1"}, 2), ({"worker": "3"}, 4)],
        "more": [({"worker": "3"}, 5)],
        "resilient_llm_worker_up": [({"worker": "1"}, 1), ({"worker": "2"}, 0), ({"worker": "3"}, 1)],
        "resilient_llm_worker_restarts": [({"worker": "1"}, 0), ({"worker": "2"}, 7), ({"worker": "3"}, 1)],
    }
    assert text.count("# HELP calls_total Calls\n") == 1


def target(**given: object) -> dict[str, Any]:
    return {
        "name": "a",
        "model": "m",
        "healthy": True,
        "circuit": "closed",
        "in_flight": 1,
        "attempts": 9,
        "failures": 0,
        "success_ratio": 1.0,
        "time_to_first_token": None,
        "latency": None,
        "cooling_down": 0.0,
        "credentials": [{"name": "k", "state": "living", "in_flight": 1, "back_in": 0.0}],
        "weight": 1.0,
        "effective_weight": 1.0,
        "limit": None,
        "by_hand": [],
        **given,
    }


def report(*targets: dict[str, Any], **given: object) -> dict[str, Any]:
    attempts = sum(one["attempts"] for one in targets)
    return {
        "attempts": attempts,
        "failures": sum(one["failures"] for one in targets),
        "success_ratio": 1.0,
        "latency": None,
        "targets": list(targets),
        "draining": False,
        "running": 2,
        "bulkheads": {"bulkhead": {"in_use": 1, "queued": 3}},
        **given,
    }


def test_what_adds_up_is_added_and_of_states_the_worst_is_told() -> None:
    worse = target(
        healthy=False,
        circuit="open",
        in_flight=4,
        attempts=99,
        failures=11,
        success_ratio=0.5,
        time_to_first_token=2.0,
        latency={"mean": 3.0, "p50": 2.0, "p95": 5.0, "p99": 6.0},
        cooling_down=8.0,
        credentials=[{"name": "k", "state": "resting", "in_flight": 2, "back_in": 8.0}],
        effective_weight=0.5,
        limit=20,
        by_hand=["isolated"],
    )
    better = target(
        limit=10, latency={"mean": 1.0, "p50": 1.0, "p95": 9.0, "p99": 9.0}, time_to_first_token=1.0
    )
    merged = one_health([report(better), report(worse, draining=True)])
    assert (merged["attempts"], merged["failures"], merged["running"], merged["draining"]) == (
        108,
        11,
        4,
        True,
    )
    assert merged["success_ratio"] == 1 - 11 / 108
    assert merged["bulkheads"] == {"bulkhead": {"in_use": 2, "queued": 6}}
    [one] = merged["targets"]
    assert (one["healthy"], one["circuit"], one["in_flight"], one["cooling_down"]) == (False, "open", 5, 8.0)
    assert (one["attempts"], one["failures"], one["by_hand"], one["limit"]) == (108, 11, ["isolated"], 30)
    assert one["success_ratio"] == (1.0 * 10 + 0.5 * 100) / 110
    assert one["time_to_first_token"] == (10 + 200) / 110
    assert one["latency"] == {"mean": 310 / 110, "p50": 210 / 110, "p95": 9.0, "p99": 9.0}
    assert one["credentials"] == [{"name": "k", "state": "resting", "in_flight": 3, "back_in": 8.0}]


def test_what_nobody_knows_stays_unknown() -> None:
    merged = one_health([report(target(attempts=0)), report(target(attempts=0))])
    assert merged["success_ratio"] is None
    [one] = merged["targets"]
    assert (one["latency"], one["time_to_first_token"], one["limit"]) == (None, None, None)


def test_canaries_that_differ_are_mixed() -> None:
    def standing(state: str, share: float, step: int | None) -> dict[str, Any]:
        seen = {"calls": 5, "errors": 1, "client_errors": 0, "p99_first_token": None}
        return {
            "canaries": {
                "c": {
                    "model": "m",
                    "state": state,
                    "share": share,
                    "step": step,
                    "waits_for": None,
                    "restarts_in": None,
                    "seen": seen,
                    "seen_of_baseline": seen,
                }
            }
        }

    same = one_health([report(**standing("running", 0.5, 1)), report(**standing("running", 0.5, 1))])
    assert (same["canaries"]["c"]["state"], same["canaries"]["c"]["step"]) == ("running", 1)
    tenths = one_health([report(**standing("running", 0.1, 0))] * 3)
    assert tenths["canaries"]["c"]["share"] == 0.1
    assert same["canaries"]["c"]["seen"] == {"calls": 10, "errors": 2, "client_errors": 0}
    mixed = one_health([report(**standing("running", 0.5, 1)), report(**standing("rolled_back", 0.0, None))])
    assert (mixed["canaries"]["c"]["state"], mixed["canaries"]["c"]["share"]) == ("mixed", 0.25)


def test_in_the_midst_of_a_reload_workers_know_different_names() -> None:
    merged = one_health([report(target(), bulkheads={}), report(target(name="b"))])
    assert merged["bulkheads"] == {"bulkhead": {"in_use": 1, "queued": 3}}
    assert [one["name"] for one in merged["targets"]] == ["a", "b"]


def test_which_limits_count_in_each_process() -> None:
    alone = '[server]\nworkers = 4\n[targets.a]\nurl = "http://a.example"\n'
    [note] = notes(parse(alone + "[quota]\nrequests_per_minute = 5\n[cache]\n[budget]\nusd_per_day = 1\n"))
    assert "itself: bulkheads, quotas, budgets, circuits, cache; up to 4 times" in note
    [note] = notes(parse(alone + '[cache]\n[store]\nredis_env = "STORE"\n'))
    assert "itself: cache;" in note
    assert not list(notes(parse(alone + '[store]\nredis_env = "STORE"\n')))
