"""What calls inherit from where they are made."""

from __future__ import annotations

import math

import anyio
import pytest

from resilient_llm import ambient
from resilient_llm.context import Ambient, current
from resilient_llm.outcome import SUCCESS
from tests.support import Door, Provider

pytestmark = pytest.mark.anyio


async def test_tenant_priority_and_deadline_are_inherited_and_restored() -> None:
    with ambient(tenant="acme", priority=2, timeout=10) as outer, ambient(timeout=20) as inner:
        assert (inner.tenant, inner.priority) == ("acme", 2)
        assert inner.deadline == outer.deadline  # a timeout can only shorten
        with ambient(tenant="other", timeout=1) as innermost:
            assert innermost.tenant == "other"
            assert innermost.deadline == pytest.approx(anyio.current_time() + 1)
        assert current.get() is inner
    assert current.get() == Ambient()


async def test_tasks_started_inside_inherit_it() -> None:
    seen: list[str | None] = []

    async def child() -> None:
        seen.append(current.get().tenant)

    async with anyio.create_task_group() as group:
        with ambient(tenant="acme"):
            group.start_soon(child)
        group.start_soon(child)
    assert sorted(seen, key=str) == [None, "acme"]


async def test_a_deadline_counts_for_nothing_once_its_call_has_finished() -> None:
    door = Door(provider=Provider(60.0))
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await anyio.sleep(1)
        call = door.calls[0]
        here = Ambient(deadline=5.0, owner=call)
        assert here.effective_deadline() == 5.0
        call.finish(SUCCESS)
        assert here.effective_deadline() == math.inf
        group.cancel_scope.cancel()
