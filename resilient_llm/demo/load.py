"""The tenants' calls, made on time whatever becomes of them, and what each tenant got.

An open loop: a tenant that is refused or kept waiting goes on calling, as users do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import anyio
import anyio.abc
import httpx2

from resilient_llm.demo.scenario import TENANTS, Tenant
from resilient_llm.errors import BulkheadFullError, CircuitOpenError

_REJECTIONS = frozenset({BulkheadFullError.reason, CircuitOpenError.reason})


@dataclass(slots=True)
class Tally:
    """What one tenant got so far; the lists hold each call's duration as the tenant measured it, in seconds."""

    calls: int = 0
    ok: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)

    @property
    def active(self) -> int:
        """How many calls have no answer yet."""
        return self.calls - len(self.ok) - len(self.rejected) - len(self.failed)

    def add(self, other: Tally) -> None:
        """Count another tenant's calls as well."""
        self.calls += other.calls
        self.ok += other.ok
        self.rejected += other.rejected
        self.failed += other.failed


class Load:
    """Call the app for all tenants at once."""

    def __init__(self, client: httpx2.AsyncClient, *, duration: float, seed: int) -> None:
        self.tallies = {tenant.name: Tally() for tenant in TENANTS}
        self.circuit_open = 0
        """How many calls were refused by an open circuit."""
        self._client = client
        self._duration = duration
        self._seed = seed
        self._started = math.nan

    @property
    def elapsed(self) -> float:
        """Give the seconds since `run` began."""
        return anyio.current_time() - self._started

    @property
    def calls(self) -> int:
        """How many calls have been made."""
        return sum(tally.calls for tally in self.tallies.values())

    async def run(self) -> None:
        """Make every call of the scenario; return when the last has been answered."""
        self._started = anyio.current_time()
        async with anyio.create_task_group() as calls:
            for tenant in TENANTS:
                calls.start_soon(self._call_on_time, tenant, calls)

    async def _call_on_time(self, tenant: Tenant, calls: anyio.abc.TaskGroup) -> None:
        for arrival in tenant.arrivals(self._duration, self._seed):
            await anyio.sleep_until(self._started + arrival)
            calls.start_soon(self._call, tenant)

    async def _call(self, tenant: Tenant) -> None:
        tally = self.tallies[tenant.name]
        tally.calls += 1
        question = {"message": f"Question {tally.calls} of {tenant.name}", "model": tenant.model}
        began = anyio.current_time()
        durations = tally.failed
        try:
            response = await self._client.post("/chat", json=question, headers={"x-tenant": tenant.name})
        except httpx2.TransportError:
            pass
        else:
            code = _error_code(response)
            if response.is_success:
                durations = tally.ok
            elif code in _REJECTIONS and "retry-after" in response.headers:
                durations = tally.rejected
                self.circuit_open += code == CircuitOpenError.reason
        durations.append(anyio.current_time() - began)


def _error_code(response: httpx2.Response) -> str | None:
    """Give the stable word by which the service says why it has no answer."""
    if response.is_success or not response.headers["content-type"].endswith("json"):
        return None
    code: str | None = response.json().get("code")
    return code
