"""One policy for each of some tenants, in the place of one for all.

Chooses and does nothing else; calls of tenants that it has none for pass to the policy for others, if there is one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from resilient_llm.ordering import Placement

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext, Policy
    from resilient_llm.message import Reply
    from resilient_llm.telemetry import Telemetry

__all__ = ["ByTenant"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ByTenant:
    """Take calls of the tenants in `own` through a policy of theirs, and those of `others` through one for all."""

    own: Mapping[str, Policy]
    others: Policy | None = None
    name: str
    placement: ClassVar[Placement] = Placement.ADMISSION

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Take a call through the policy of its tenant."""
        policy = self.own.get(call.tenant or "", self.others)
        return call_next(call) if policy is None else policy(call, call_next)

    def check(self, policies: Sequence[object]) -> None:
        """Let the policies check the pipeline that they stand in."""
        for check in self._each("check"):
            check(policies)

    def observe(self, telemetry: Telemetry) -> None:
        """Let the policies report their gauges."""
        for observe in self._each("observe"):
            observe(telemetry)

    def policy_of(self, tenant: str | None) -> Policy | None:
        """Give the policy that calls of a tenant go through."""
        return self.own.get(tenant or "", self.others)

    def _each(self, method: str) -> list[Callable[..., None]]:
        policies = [*self.own.values(), *([] if self.others is None else [self.others])]
        return [found for policy in policies if (found := getattr(policy, method, None)) is not None]
