"""Places in line: one that was granted is used, and one whose owner has died is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from resilient_llm import RateLimit
from resilient_llm.core.shared_rate import RateCharge, RateDecision, RateLedger, TakeMode, Verdict
from resilient_llm.stores import MemoryStore
from resilient_llm.stores.memory import MemoryRates
from tests.support import Door, Provider

CHARGE = RateCharge("k", 1.0, 4.0, 1.0, own=True)


class SlowRates(MemoryRates):
    """Decide at once, and take longer to say so than anybody was allowed to wait."""

    async def take(
        self, account: str, charges: Sequence[RateCharge], *, most_wait: float = 0.0, mode: TakeMode = "n"
    ) -> RateDecision:
        decision = await super().take(account, charges, most_wait=most_wait, mode=mode)
        await anyio.sleep(0.02)
        return decision


@pytest.mark.anyio
async def test_a_place_is_used_however_long_the_answer_took() -> None:
    store = MemoryStore()
    store.rates = SlowRates()
    first, second = (
        Door(RateLimit(store=store, requests_per_minute=60, window=1, max_wait=0), provider=Provider())
        for _ in range(2)
    )
    began = anyio.current_time()
    await first(tenant="a")
    await anyio.sleep_until(began + 0.995)
    await second(tenant="a")
    assert anyio.current_time() - began < 1.1


def test_places_of_the_dead_are_forgotten_while_others_keep_places() -> None:
    ledger = RateLedger()
    assert ledger.take([CHARGE], 0.0).verdict is Verdict.TAKEN
    for _ in range(3):
        assert ledger.take([CHARGE], 0.0, most_wait=30.0, mode="h").verdict is Verdict.HELD
    now, mine, grants = 0.1, 0.0, []
    while now < 12.0:
        decision = ledger.take([CHARGE._replace(held=mine)], now, most_wait=30.0, mode="h")
        mine = decision.held[0]
        if decision.verdict is Verdict.TAKEN:
            grants.append(now)
            now += 0.001
        else:
            now += decision.again + 1e-6
    assert sum(at >= 8.0 for at in grants) >= 15


@pytest.mark.parametrize("wait", [0.25, 20.0])
def test_places_of_the_living_are_not_forgotten_before_their_time(wait: float) -> None:
    charge = CHARGE._replace(rate=1 / wait)
    ledger = RateLedger()
    ledger.take([charge], 0.0)
    first = ledger.take([charge], 0.0, most_wait=100.0, mode="h")
    assert first.again == pytest.approx(wait)
    # Newcomers find it there until its turn, whatever else is looked at meanwhile.
    for step in range(100):
        at = wait * step / 100
        assert ledger.take([charge], at).wait == pytest.approx(2 * wait - at)
    assert ledger.take([charge._replace(held=1.0)], wait + 1e-6).verdict is Verdict.TAKEN
