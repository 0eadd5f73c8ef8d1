"""The demo's script: as many calls as it says, the same for the same seed."""

from __future__ import annotations

from itertools import pairwise

from resilient_llm.demo.scenario import FAILING_MODEL, MODEL, NOISE, NOISY, QUIET, TENANTS, Faults
from resilient_llm.testing import OK, ProviderRequest


def request(model: str, arrived: float) -> ProviderRequest:
    return ProviderRequest(
        number=1, method="POST", path="/", headers={}, tenant=None, arrived=arrived, model=model
    )


def test_calls_come_at_a_tenants_rate_but_not_at_once() -> None:
    for tenant in TENANTS:
        arrivals = list(tenant.arrivals(15, 1))
        assert len(arrivals) == 15 * tenant.rate
        assert arrivals == sorted(arrivals)
        assert arrivals[0] >= 0
        assert arrivals[-1] < 15
        gaps = [later - earlier for earlier, later in pairwise(arrivals)]
        assert max(gaps) <= 2 / tenant.rate
        assert len(set(gaps)) > len(gaps) / 2
    assert NOISY.rate == NOISE * QUIET[0].rate


def test_a_seed_gives_the_same_again() -> None:
    first, again, other = (list(QUIET[0].arrivals(15, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first != list(QUIET[1].arrivals(15, 1))


def test_faults_by_chance_are_counted_by_kind() -> None:
    faults = Faults(15, seed=1)
    chosen = [faults.at_random(request(MODEL, 0.0)) for _ in range(2000)]
    assert faults.injected.keys() == {"429", "503", "reset", "slow"}
    assert faults.injected.total() == sum(fault is not OK for fault in chosen)
    assert faults.injected["503"] == sum(fault.status == 503 for fault in chosen)
    assert faults.failures == faults.injected.total() - sum(fault.delay_headers > 0 for fault in chosen)
    assert 200 < faults.failures < 280


def test_the_outage_begins_after_a_quarter_and_ends() -> None:
    faults = Faults(16, seed=1)
    assert faults.while_down(request(FAILING_MODEL, 5.0)) is OK  # the demo's time has not begun
    faults.start(100.0)
    down = [faults.while_down(request(FAILING_MODEL, at)) is not OK for at in (103.9, 104.0, 107.9, 108.0)]
    assert down == [False, True, True, False]
    assert faults.injected == {"outage": 2}
