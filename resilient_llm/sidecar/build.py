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
from resilient_llm.errors import ConfigurationError
from resilient_llm.policies import CircuitBreaker, Hedge, Retry, Stream
from resilient_llm.policies._store_names import claimed_anew
from resilient_llm.routing import Canary, Router
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
from resilient_llm.sidecar.call_policies import canaries, middle, replays
from resilient_llm.sidecar.config import key_hashes
from resilient_llm.sidecar.masked import Secrets
from resilient_llm.sidecar.parts import Parts
from resilient_llm.sidecar.problems import ConfigError, Problem, at, needing
from resilient_llm.sidecar.targets import Targets

if TYPE_CHECKING:
    from resilient_llm.asgi.rate_limit_headers import HeadersOf
    from resilient_llm.call import Policy
    from resilient_llm.routing.balancers import Balancer
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.engine import Engine
    from resilient_llm.stores import RedisStore
    from resilient_llm.telemetry import Telemetry

__all__ = ["Setup", "build"]

_MIN_SECRET = 8
"""Characters of a key; a shorter one, as of a server that wants none, would be found in any text."""

ANY = "any"
"""What a router calls the model of calls for whatever they ask for, where no models are declared."""

_MINDING: Mapping[type[Stream | Retry | Hedge], tuple[str, ...]] = {
    Stream: ("stream", "resume"),
    Retry: ("retry",),
    Hedge: ("hedge",),
}
"""Policies that cannot stand among every other, and what is said of them."""

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
    alone: Mapping[str, Router]
    """The routers behind those doors."""
    places: Mapping[str, Sequence[tuple[str, Router]]]
    """Where each target of the configuration stands: what it is called in which router."""
    canaries: Mapping[str, Canary]
    circuits: Mapping[str, list[tuple[str, CircuitBreaker]]]
    quotas: list[ByTenant]
    secrets: Secrets
    """The providers' keys there were when it was made, for leaving them out."""
    store: RedisStore | None
    telemetry: Telemetry | None
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

    def count_refusal(self, code: str) -> None:
        """Count a request that was refused before it was a call: calls are counted by their own end."""
        if self.telemetry is not None:
            self.telemetry.request_refused(code)

    @property
    def models(self) -> list[str]:
        """Give the names that callers may ask for; none where they may ask for anything."""
        return [*self.config.models, *self.config.tiers]

    async def aclose(self) -> None:
        """Close what no successor has taken over."""
        after = None if self.successor is None else self.successor.parts
        for part in self.parts.left_out(after):
            if part is self.store and self.store is not None:
                await self.store.aclose()


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
    with at(), claimed_anew(store):
        return _build(config, engine, parts, keys, store, telemetry, previous)


def _build(  # noqa: PLR0917 - in the order in which they are made
    config: Config,
    engine: Engine,
    parts: Parts,
    keys: TenantKeys,
    store: RedisStore | None,
    telemetry: Telemetry | None,
    previous: Setup | None,
) -> Setup:
    targets = Targets(config, parts, store)
    router = _router(config, targets)
    alone = {
        name: Router([targets.by_name[name]], name=f"router to {name}")
        for name, options in config.targets.items()
        if options.passthrough
    }
    before = admission(config, parts, store)
    rollouts = canaries(config, parts)
    policies = [*before, *middle(config, parts, store), *rollouts.values(), *replays(config), router]
    _check_together(policies)
    door = ClientDoor(
        engine,
        synthesise=engine.synthesise,
        errors=engine.errors,
        policies=policies,
        redirects="fail",
        name="sidecar",
        telemetry=telemetry,
    )
    passthrough = {
        name: ClientDoor(
            engine,
            synthesise=engine.synthesise,
            errors=engine.errors,
            policies=[*before, *replays(config, alone=True), only],
            name=f"sidecar to {name}",
            telemetry=telemetry,
        )
        for name, only in alone.items()
    }
    parts.done()
    if previous is not None:  # nothing can go wrong any more
        router.take_over(previous.router)
        for name in alone.keys() & previous.alone.keys():
            alone[name].take_over(previous.alone[name])
    return Setup(
        config=config,
        keys=keys,
        router=router,
        door=door,
        passthrough=passthrough,
        alone=alone,
        places=_places(config, targets, router, alone),
        canaries=rollouts,
        circuits=targets.circuits(),
        quotas=[policy for policy in before if isinstance(policy, ByTenant) and policy.name == "quotas"],
        secrets=Secrets(
            secret
            for target in targets.by_name.values()
            for index in range(len(target.credentials))
            if len(secret := target.secret(index)) >= _MIN_SECRET
        ),
        store=store,
        telemetry=telemetry,
        parts=parts,
    )


def _check_together(policies: Sequence[Policy]) -> None:
    """Have those that mind what stands around them say so, each as of its own table."""
    for policy in policies:
        for kind, place in _MINDING.items():
            if isinstance(policy, kind):
                with at(*place):
                    policy.check(policies)


def _store(config: Config, parts: Parts, environ: Mapping[str, str]) -> RedisStore | None:
    options = config.store
    if options is None:
        return None
    url = environ.get(options.redis_env)
    if not url:
        message = f"the environment variable {options.redis_env} is not set"
        raise ConfigError([Problem(("store", "redis_env"), message)])
    with needing("redis-py", "redis", "store"):
        from resilient_llm.stores import RedisStore  # noqa: PLC0415 - an extra, and slow to load

    given: dict[str, Any] = options.model_dump(include={"prefix", "timeout", "lease"}, exclude_none=True)
    with at("store", given=options):
        try:
            return parts.keep(
                "store", (options, url), lambda: RedisStore(url, on_store_error=options.on_error, **given)
            )
        except ConfigurationError as error:
            what, _, why = str(error).partition("; ")
            if not what.startswith("server="):
                raise
            message = f"the URL in the environment variable {options.redis_env} is none of a store: {why}"
            raise ConfigError([Problem(("store", "redis_env"), message)]) from error


def _router(config: Config, targets: Targets) -> Router:
    options = config.routing
    models = targets.models()
    default = options.default
    if not models:
        models, default = {ANY: list(targets.by_name.values())}, ANY
    given: dict[str, Any] = options.given()
    for name in ("default", "balancer"):
        given.pop(name, None)
    with at("routing", given=options):
        return Router(
            models,
            fallbacks={name: model.fallbacks for name, model in config.models.items() if model.fallbacks},
            default=default,
            balancer=_BALANCERS[options.balancer](),
            **given,
        )


def _places(
    config: Config, targets: Targets, router: Router, alone: Mapping[str, Router]
) -> dict[str, list[tuple[str, Router]]]:
    found: dict[str, list[tuple[str, Router]]] = {name: [] for name in config.targets}
    for name, target in targets.all():
        if router.has(target.name):
            found[name].append((target.name, router))
    for name, only in alone.items():
        found[name].append((name, only))
    return found
