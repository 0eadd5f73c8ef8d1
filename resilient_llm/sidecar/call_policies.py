"""The policies between the limits on whole calls and the router: cache, tiers, canaries, and what tries again.

Made of their tables, in order. What a table may say is checked before, and by the policies themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient_llm.core.backoff import Backoff
from resilient_llm.core.slo import SLO
from resilient_llm.policies import Cache, Hedge, Retry, Stream
from resilient_llm.routing import Canary, Tier, TierRouter
from resilient_llm.sidecar.problems import at

if TYPE_CHECKING:
    from resilient_llm.call import Policy
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.parts import Parts
    from resilient_llm.stores import RedisStore

__all__ = ["canaries", "middle", "replays"]


def middle(config: Config, parts: Parts, store: RedisStore | None) -> list[Policy]:
    """Make what answers without a provider, and what chooses the model."""
    policies: list[Policy] = []
    if config.cache is not None:
        given: dict[str, Any] = config.cache.given()
        if store is not None and config.store is not None and "cache" in config.store.share:
            given["store"] = store.replies
        with at("cache", given=config.cache):
            # What answers must be the same, too: a reply of another model is none.
            same = (config.cache, config.store, config.targets, config.models, config.tiers, config.canary)
            policies.append(parts.keep("cache", same, lambda: Cache(**given)))
    if config.tiers:
        with at("tiers"):
            policies.append(
                TierRouter(
                    {
                        name: [Tier(tier.model, up_to=tier.up_to) for tier in virtual.tiers]
                        for name, virtual in config.tiers.items()
                    },
                    prefer={name: virtual.prefer for name, virtual in config.tiers.items()},
                )
            )
    return policies


def canaries(config: Config, parts: Parts) -> dict[str, Canary]:
    """Make the canaries; each goes on where it was while it, and the models that it is about, are the same."""
    found: dict[str, Canary] = {}
    for name, canary in config.canary.items():
        with at("canary", name, given=canary):
            given: dict[str, Any] = canary.given()
            if canary.key is not None:
                given["key"] = canary.key[0] if len(canary.key) == 1 else tuple(canary.key)
            if "slo" in given:
                with at("canary", name, "slo", given=canary.slo):
                    given["slo"] = SLO(**given["slo"])
            found[name] = parts.keep(
                f"canary.{name}",
                (canary, config.models[canary.model], config.models[canary.candidate]),
                lambda name=name, given=given: Canary(name=name, **given),  # type: ignore[misc]
            )
    return found


def replays(config: Config, *, alone: bool = False) -> list[Policy]:
    """Make what tries again; `alone` with one target only."""
    streams: dict[str, Any] = config.stream.given()
    if alone:
        streams = {name: value for name, value in streams.items() if name not in ("resume", "prefill")}
    with at("stream", given=config.stream):
        policies: list[Policy] = [Stream(**streams)]
    if config.retry.enabled:
        retries: dict[str, Any] = config.retry.given()
        if "backoff" in retries:
            with at("retry", "backoff", given=config.retry.backoff):
                retries["backoff"] = Backoff(**retries["backoff"])
        with at("retry", given=config.retry):
            policies.append(Retry(**retries))
    if config.hedge is not None and not alone:
        hedges: dict[str, Any] = config.hedge.given()
        with at("hedge", given=config.hedge):
            policies.append(Hedge(**hedges))
    return policies
