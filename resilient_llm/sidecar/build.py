"""From a configuration to what answers calls: policies in order, a router, client doors, the tenants' keys.

Composition only. If something is to be decided while a call runs, it is missing in the library, not in here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient_llm.asgi.rate_limit_headers import rate_limit_headers
from resilient_llm.client import ClientDoor
from resilient_llm.core.backoff import Backoff
from resilient_llm.policies import (
    Cache,
    CircuitBreaker,
    Hedge,
    Retry,
    Stream,
)
from resilient_llm.routing import Router, Tier, TierRouter
from resilient_llm.routing.balancers import (
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)
from resilient_llm.sidecar.admission import admission
from resilient_llm.sidecar.auth import TenantKeys
from resilient_llm.sidecar.by_tenant import ByTenant
from resilient_llm.sidecar.config import key_hashes
from resilient_llm.sidecar.exchange import witness
from resilient_llm.sidecar.parts import Parts
from resilient_llm.sidecar.problems import ConfigError, Problem, at
from resilient_llm.sidecar.targets import Targets
from resilient_llm.stores import RedisStore

if TYPE_CHECKING:
    from resilient_llm.asgi.rate_limit_headers import HeadersOf
    from resilient_llm.call import Policy
    from resilient_llm.routing.balancers import Balancer
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.engine import Engine
    from resilient_llm.telemetry import Telemetry

__all__ = ["Setup", "build"]

_MIN_SECRET = 8
"""Characters of a key; a shorter one, as of a server that wants none, would be found in any text."""

ANY = "any"
"""What a router calls the model of calls for whatever they ask for, where no models are declared."""

_BALANCERS: Mapping[str, type[Balancer]] = {
    balancer.strategy: balancer
    for balancer in (
        Cheapest,
        LeastOutstandingTokens,
        PeakEWMA,
        PrefixAffinity,
        Priority,
        WeightedLeastConnections,
        WeightedRandom,
    )
}


@dataclass(kw_only=True, eq=False)
class Setup:
    """Hold what answers calls under one configuration."""

    config: Config
    keys: TenantKeys
    router: Router
    door: ClientDoor
    passthrough: Mapping[str, ClientDoor]
    """Doors that lead to one target each, for callers that name it."""
    circuits: Mapping[str, list[tuple[str, CircuitBreaker]]]
    quotas: list[ByTenant]
    secrets: Sequence[bytes]
    """The providers' keys there were when it was made, for leaving them out."""
    parts: Parts
    running: int = 0
    """Requests that are being answered under it."""
    retired: bool = False
    successor: Setup | None = field(default=None, repr=False)

    _limits: dict[str, HeadersOf | None] = field(default_factory=dict, repr=False)

    def limits_of(self, tenant: str | None) -> HeadersOf | None:
        """Give what tells a tenant of its rate limits, in headers."""
        if not self.quotas or not self.config.server.rate_limit_headers:
            return None
        name = tenant or ""
        if name not in self._limits:
            policies = [quota.policy_of(tenant) for quota in self.quotas]
            self._limits[name] = rate_limit_headers(policies)
        return self._limits[name]

    @property
    def models(self) -> list[str]:
        """Give the names that callers may ask for; none where they may ask for anything."""
        return [*self.config.models, *self.config.tiers]

    async def aclose(self) -> None:
        """Close what no successor has taken over."""
        after = None if self.successor is None else self.successor.parts
        for part in self.parts.left_out(after):
            if isinstance(part, RedisStore):
                await part.aclose()


def build(
    config: Config,
    engine: Engine,
    *,
    telemetry: Telemetry | None = None,
    previous: Setup | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Setup:
    """Make everything anew but for what `previous` has that did not change.

    Raises `ConfigError`, and leaves `previous` as it is, when that cannot be done.
    """
    parts = Parts(None if previous is None else previous.parts)
    keys = TenantKeys(key_hashes(config, environ))
    store = _store(config, parts, environ)
    targets = Targets(config, parts, store)
    router = _router(config, targets)
    before = admission(config, parts, store)
    middle = _middle(config, store)
    with at():
        door = ClientDoor(
            engine,
            synthesise=engine.synthesise,
            errors=engine.errors,
            policies=[witness, *before, *middle, *_replays(config), router],
            name="sidecar",
            telemetry=telemetry,
        )
        passthrough = {
            name: ClientDoor(
                engine,
                synthesise=engine.synthesise,
                errors=engine.errors,
                policies=[witness, *before, *_replays(config, alone=True), Router([targets.by_name[name]])],
                name=f"sidecar to {name}",
                telemetry=telemetry,
            )
            for name, options in config.targets.items()
            if options.passthrough
        }
    parts.done()
    return Setup(
        config=config,
        keys=keys,
        router=router,
        door=door,
        passthrough=passthrough,
        circuits=targets.circuits(),
        quotas=[policy for policy in before if isinstance(policy, ByTenant) and policy.name == "quotas"],
        secrets=[
            secret.encode()
            for target in targets.by_name.values()
            for index in range(len(target.credentials))
            if len(secret := target.secret(index)) >= _MIN_SECRET
        ],
        parts=parts,
    )


def _store(config: Config, parts: Parts, environ: Mapping[str, str]) -> RedisStore | None:
    options = config.store
    if options is None:
        return None
    url = environ.get(options.redis_env)
    if not url:
        message = f"the environment variable {options.redis_env} is not set"
        raise ConfigError([Problem(("store", "redis_env"), message)])
    given: dict[str, Any] = options.model_dump(include={"prefix", "timeout"}, exclude_none=True)
    with at("store"):
        return parts.keep(
            "store", (options, url), lambda: RedisStore(url, on_store_error=options.on_error, **given)
        )


def _router(config: Config, targets: Targets) -> Router:
    options = config.routing
    models = targets.models()
    default = options.default
    if not models:
        models, default = {ANY: list(targets.by_name.values())}, ANY
    given: dict[str, Any] = options.given()
    for name in ("default", "balancer"):
        given.pop(name, None)
    with at("routing"):
        return Router(
            models,
            fallbacks={name: model.fallbacks for name, model in config.models.items() if model.fallbacks},
            default=default,
            balancer=_BALANCERS[options.balancer](),
            **given,
        )


def _middle(config: Config, store: RedisStore | None) -> list[Policy]:
    policies: list[Policy] = []
    if config.cache is not None:
        given: dict[str, Any] = config.cache.given()
        if store is not None and config.store is not None and "cache" in config.store.share:
            given["store"] = store.replies
        with at("cache"):
            policies.append(Cache(**given))
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


def _replays(config: Config, *, alone: bool = False) -> list[Policy]:
    """Make what tries again; `alone` with one target only."""
    streams: dict[str, Any] = config.stream.given()
    if alone:
        streams = {name: value for name, value in streams.items() if name not in ("resume", "prefill")}
    with at("stream"):
        policies: list[Policy] = [Stream(**streams)]
    if config.retry.enabled:
        retries: dict[str, Any] = config.retry.given()
        with at("retry"):
            if "backoff" in retries:
                retries["backoff"] = Backoff(**retries["backoff"])
            policies.append(Retry(**retries))
    if config.hedge is not None and not alone:
        hedges: dict[str, Any] = config.hedge.given()
        with at("hedge"):
            policies.append(Hedge(**hedges))
    return policies
