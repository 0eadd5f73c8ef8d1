"""Tenants at one adaptive limit: nobody fills the queue for the others."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from resilient_llm import ConcurrencyLimit, ConcurrencyLimitError, ConfigurationError, Pipeline, ambient
from resilient_llm.policies._shares import fair_room

pytestmark = pytest.mark.anyio


class Tenants:
    """Calls of one second each through one limit, and when those of each tenant were done."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self.limit = limit
        self.pipeline = Pipeline([limit])
        self.refused: Counter[str] = Counter()
        self.done: list[tuple[float, str]] = []

    async def call(self, tenant: str, priority: int = 0) -> None:
        with ambient(tenant=tenant, priority=priority):
            try:
                await self.pipeline.run(_second)
            except ConcurrencyLimitError:
                self.refused[tenant] += 1
            else:
                self.done.append((anyio.current_time(), tenant))


async def _second() -> None:
    await anyio.sleep(1.0)


def _limit(**options: object) -> ConcurrencyLimit:
    return ConcurrencyLimit(**{"initial": 2, "max": 2, "key": lambda _call: None, "max_wait": 600, **options})  # type: ignore[arg-type]


async def test_one_tenant_cannot_fill_the_queue() -> None:
    tenants = Tenants(_limit(max_queued=10))
    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(tenants.call, "noisy")
        await anyio.sleep(0.5)
        assert tenants.limit.queued() == 10
        for _ in range(5):
            tasks.start_soon(tenants.call, "quiet")
    assert tenants.refused == {"noisy": 38}
    assert max(time for time, tenant in tenants.done if tenant == "quiet") <= 6, "in turn with the noisy one"


async def test_the_queue_of_all_is_bounded_too() -> None:
    tenants = Tenants(_limit(max_queued=5, max_queued_total=8))
    async with anyio.create_task_group() as tasks:
        for tenant in "abc":
            for _ in range(7):
                tasks.start_soon(tenants.call, tenant)
                await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.5)
        assert tenants.limit.queued() == 8
    assert sum(tenants.refused.values()) == 21 - 2 - 8


async def test_weights_divide_the_slots_among_those_who_wait() -> None:
    tenants = Tenants(_limit(weights={"big": 3}))
    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(tenants.call, "big")
            tasks.start_soon(tenants.call, "small")
    served = Counter(tenant for time, tenant in tenants.done if 1.5 < time < 11.5)
    assert served["big"] == pytest.approx(15, abs=2)


@pytest.mark.parametrize(("ageing", "first"), [(10.0, True), (0.0, False)])
async def test_priorities_age(ageing: float, first: bool) -> None:
    limit = _limit(initial=1, max=1, ageing=ageing)
    pipeline = Pipeline([limit])
    order: list[int] = []

    async def call(priority: int) -> None:
        with ambient(tenant="a", priority=priority):
            await pipeline.run(_second)
        order.append(priority)

    async with anyio.create_task_group() as tasks:
        for priority in (0, 1, 9):
            tasks.start_soon(call, priority)
            await anyio.sleep(0.1)
    assert order == ([0, 9, 1] if first else [0, 1, 9])


async def test_a_dry_run_refuses_by_tenant_too() -> None:
    limit = _limit(max_queued=3, dry_run=True)
    pipeline = Pipeline([limit])
    async with anyio.create_task_group() as tasks:
        for tenant in ["noisy"] * 20 + ["quiet"] * 3:
            with ambient(tenant=tenant):
                tasks.start_soon(pipeline.run, _second)
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.5)
        assert (limit.in_use(), limit.queued()) == (2, 6)
    assert (limit.in_use(), limit.queued()) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queued": 5, "max_queued_total": 4}, "max_queued_total=4: allowed are whole numbers from 5"),
        ({"max_queued": -1}, "max_queued=-1"),
        ({"weights": {"a": 0}}, "weights: 0 for 'a'"),
        ({"weights": 3}, "weights=3"),
        ({"ageing": -1.0}, "ageing=-1.0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        _limit(**options)
    assert message in str(raised.value)


def test_a_room_for_nobody_has_no_room() -> None:
    room = fair_room(max_queued=0, max_queued_total=None, weights=None, ageing=10)
    assert room.push("a", 0.0) is None
