"""The limits on whole calls: a deadline, and what each tenant may have of slots, requests, tokens and money.

Each is kept, with what it has counted, where it and what it is made of have not changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_llm.policies import Budget, Bulkhead, Deadline, MemoryLedger, RateLimit
from resilient_llm.sidecar.by_tenant import ByTenant
from resilient_llm.sidecar.problems import at

if TYPE_CHECKING:
    from resilient_llm.call import Policy
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.parts import Parts
    from resilient_llm.stores import RedisStore

__all__ = ["admission"]


def admission(config: Config, parts: Parts, store: RedisStore | None) -> list[Policy]:
    """Make the policies that stand outermost, in order."""
    shared = set() if config.store is None else set(config.store.share)
    with at("server", "deadline"):
        policies: list[Policy] = [Deadline(config.server.deadline)]
    weights = {name: tenant.weight for name, tenant in config.tenants.items()}

    leases: dict[str, Any] = {"store": store} if store is not None and "bulkheads" in shared else {}
    if own := {name: tenant.bulkhead for name, tenant in config.tenants.items() if tenant.bulkhead}:
        bulkheads: dict[str, Policy] = {}
        for name, bulkhead in own.items():
            with at("tenants", name, "bulkhead", given=bulkhead):
                options: dict[str, Any] = bulkhead.model_dump()
                bulkheads[name] = parts.keep(
                    f"bulkhead.{name}",
                    (bulkhead, config.store),
                    lambda name=name, options=options: Bulkhead(name=f"bulkhead.{name}", **options, **leases),  # type: ignore[misc]
                )
        policies.append(ByTenant(own=bulkheads, name="bulkheads"))
    if config.bulkhead.enabled:
        with at("bulkhead", given=config.bulkhead):
            common: dict[str, Any] = config.bulkhead.model_dump(exclude_none=True, exclude={"enabled"})
            if config.bulkhead.shared is not None:
                common["weights"] = weights
            policies.append(
                parts.keep(
                    "bulkhead",
                    (config.bulkhead, weights, config.store),
                    lambda: Bulkhead(**common, **leases),
                )
            )
    if quotas := _quotas(config, parts, store if "quotas" in shared else None):
        policies.append(quotas)
    if (budget := _budget(config, parts, store if "budgets" in shared else None)) is not None:
        policies.append(budget)
    return policies


def _quotas(config: Config, parts: Parts, store: RedisStore | None) -> ByTenant | None:
    found = {name: tenant.quota for name, tenant in config.tenants.items() if tenant.quota}
    rates: dict[str, Any] = {} if store is None else {"store": store}
    own: dict[str, Policy] = {}
    for name, quota in found.items():
        with at("tenants", name, "quota", given=quota):
            own[name] = parts.keep(
                f"quota.{name}",
                (quota, config.store),
                lambda name=name, quota=quota: RateLimit(name=f"quota.{name}", **quota.given(), **rates),  # type: ignore[misc]
            )
    others: Policy | None = None
    if config.quota is not None:
        with at("quota", given=config.quota):
            given: dict[str, Any] = config.quota.given()
            others = parts.keep(
                "quota", (config.quota, config.store), lambda: RateLimit(name="quota", **given, **rates)
            )
    return ByTenant(own=own, others=others, name="quotas") if own or others is not None else None


def _budget(config: Config, parts: Parts, store: RedisStore | None) -> Budget | None:
    """Make the one budget; what is spent is in its ledger, and stays while the caps change."""
    common: dict[str, Any] = {} if config.budget is None else config.budget.given()
    allowances: dict[str, Any] = {}
    for cap in ("usd_per_day", "usd_per_month", "tokens_per_day", "tokens_per_month"):
        own = {
            name: value
            for name, tenant in config.tenants.items()
            if tenant.budget is not None and (value := getattr(tenant.budget, cap)) is not None
        }
        if own or cap in common:
            allowances[cap] = {**own, "*": common.pop(cap, None)}
    if not allowances:
        return None
    ledger = parts.keep("ledger", None, MemoryLedger) if store is None else store.ledger
    with at("budget", given=config.budget):
        return Budget(**allowances, ledger=ledger, **common)
