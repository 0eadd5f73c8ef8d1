"""Faults for the fake provider by name or from a file, and what is said about those that are wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from resilient_llm.cli.faults import PRESETS, FaultsError, Scripts, read_faults
from resilient_llm.testing import OK, Fault, ProviderRequest


def read(tmp_path: Path, content: object) -> Scripts:
    path = tmp_path / "faults.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_faults(str(path), Random(1))


def played(scripts: Scripts, arrivals: list[float]) -> Counter[Fault]:
    script = scripts[None]
    assert callable(script)
    faults: Counter[Fault] = Counter()
    for number, arrived in enumerate(arrivals, 1):
        request = ProviderRequest(
            number=number, method="POST", path="/", headers={}, tenant=None, arrived=arrived
        )
        faults[script(request)] += 1
    return faults


def test_no_faults() -> None:
    assert played(read_faults("none", Random(1)), [0.0] * 100) == {OK: 100}


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"none"}))
def test_a_preset_fails_some_requests_and_not_all(name: str) -> None:
    faults = played(read_faults(name, Random(1)), [n / 10 for n in range(1000)])
    assert 1 < len(faults) <= 10
    assert 300 < faults[OK] < 950


def test_a_seed_gives_the_same_faults_again() -> None:
    draws = [played(read_faults("flaky", Random(seed)), [0.0] * 200) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_a_list_is_played_in_order(tmp_path: Path) -> None:
    listed = [{"status": 503}, {}, {"cut_after_tokens": 3, "headers": {"x-n": 2}}]
    assert read(tmp_path, listed) == {
        None: [Fault(status=503), OK, Fault(cut_after_tokens=3, headers={"x-n": "2"})]
    }


def test_a_list_with_chances_is_drawn_from(tmp_path: Path) -> None:
    listed = [{"chance": 0.25, "status": 429, "headers": {"retry-after": 2}}, {"chance": 0.25, "reset": True}]
    faults = played(read(tmp_path, listed), [0.0] * 1000)
    assert faults.keys() == {OK, Fault(reset=True), Fault(status=429, headers={"retry-after": "2"})}
    assert all(200 < faults[fault] < 300 for fault in faults if fault is not OK)


def test_lists_by_model(tmp_path: Path) -> None:
    assert read(tmp_path, {"large": [{"status": 503}], "*": []}) == {"large": [Fault(status=503)], None: []}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[", "Expecting value"),
        ('"503"', "a list of faults is wanted"),
        ([503], "a list of faults is wanted"),
        ({"large": {"status": 503}}, "large: a list of faults is wanted"),
        ([{"status": 503}, {"state": 503}], "fault 2: 'state': allowed are chance, status, headers"),
        ([{"status": "503"}], "fault 1: status='503': allowed is int | None"),
        ([{"status": True}], "fault 1: status=True: allowed is int | None"),
        ([{"reset": 1}], "fault 1: reset=1: allowed is bool"),
        ([{"headers": ["retry-after: 1"]}], "allowed is collections.abc.Mapping[str, str]"),
        ([{"status": 99}], "fault 1: status must be an HTTP status of 200 to 599, got 99"),
        ([{"status": 503, "reset": True}], "fault 1: an answer by status or body has no reply"),
        ([{"chance": 0.5, "status": 503}, {"status": 500}], "either every fault has a chance or none has"),
        ([{"chance": 1.5, "status": 503}], "probabilities must be >= 0 and add up to at most 1"),
        ([{"chance": "often", "status": 503}], "faults.json: "),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, content: object, complaint: str) -> None:
    with pytest.raises(FaultsError) as raised:
        read(tmp_path, content)
    assert complaint in str(raised.value)
    assert str(tmp_path / "faults.json") in str(raised.value)


def test_neither_a_name_nor_a_file(tmp_path: Path) -> None:
    with pytest.raises(FaultsError, match="neither a file nor one of none, flaky, throttled"):
        read_faults("flakey", Random(1))
    with pytest.raises(FaultsError, match="directory"):
        read_faults(str(tmp_path), Random(1))
