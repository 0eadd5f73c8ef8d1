"""What is right by itself in a configuration, and wrong together with the rest of it."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from resilient_llm.sidecar.options import Caps
from resilient_llm.sidecar.problems import Problem, did_you_mean

if TYPE_CHECKING:
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.options import BudgetOptions
    from resilient_llm.sidecar.tables import Admin, Server

__all__ = ["misfits"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_RESERVED = frozenset({"v1", "admin", "healthz", "readyz", "metrics"})
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not listened on


def misfits(config: Config) -> Iterator[Problem]:
    """Find what is right by itself and wrong together."""
    yield from _bad_names(config)
    yield from _unknown_names(config)
    server = config.server
    if not config.tenants and not server.open and not _is_loopback(server.host):
        yield Problem(
            ("server", "host"),
            "without tenants anybody who reaches it could spend your money: "
            "add [tenants.NAME] with key_env, listen on 127.0.0.1, or set server.open = true",
            f'"{server.host}"',
        )
    if config.admin.enabled and config.admin.token_env is None and not _is_loopback(config.admin.host):
        yield Problem(
            ("admin", "host"),
            "not on loopback it needs admin.token_env, the environment variable with the token",
            f'"{config.admin.host}"',
        )
    if server.workers > 1 and sys.platform != "linux":
        why = "several processes can share a port on Linux only: run several sidecars behind a load balancer"
        yield Problem(("server", "workers"), why, str(server.workers))
    if config.admin.enabled and _same_address(server, config.admin):
        why = "the listener for callers has this port; each needs its own"
        yield Problem(("admin", "port"), why, str(config.admin.port))
    budgets = [tenant.budget for tenant in config.tenants.values() if tenant.budget is not None]
    for name, tenant in config.tenants.items():
        if tenant.budget is not None and not tenant.budget.given():
            yield Problem(("tenants", name, "budget"), "has no cap")
    if config.budget is not None and not budgets and not _caps(config.budget):
        yield Problem(("budget",), f"has no cap; allowed are {', '.join(Caps.model_fields)}")


def _bad_names(config: Config) -> Iterator[Problem]:
    for table, names in (
        ("tenants", config.tenants),
        ("targets", config.targets),
        ("canary", config.canary),
    ):
        for name in names:
            if not _NAME.fullmatch(name):
                yield Problem(
                    (table, name), "allowed are names of letters, digits, _, . and -, up to 64 of them"
                )
            elif table == "targets" and name in _RESERVED:
                yield Problem(
                    (table, name), f"this name is taken; not allowed are {', '.join(sorted(_RESERVED))}"
                )
    for table, models in (("models", config.models), ("tiers", config.tiers)):
        for name in models:
            if not name or not name.isprintable() or len(name) > 256:
                yield Problem((table, name), "allowed are printable names of up to 256 characters")
    for name in config.tiers.keys() & config.models.keys():
        yield Problem(("tiers", name), "is the name of a model too")


def _unknown_names(config: Config) -> Iterator[Problem]:
    """Find names of targets and models that there are none of."""
    models = config.models
    for name, model in models.items():
        for index, one in enumerate(model.targets):
            yield from _unless_known(one.target, config.targets, "models", name, "targets", index)
            if one in model.targets[:index]:
                called = one.target if one.model is None else f"{one.target}/{one.model}"
                yield Problem(("models", name, "targets", index), "is there already", f'"{called}"')
        others = [other for other in models if other != name]
        for other in model.fallbacks:
            yield from _unless_known(other, others, "models", name, "fallbacks")
    for name, virtual in config.tiers.items():
        for index, tier in enumerate(virtual.tiers):
            yield from _unless_known(tier.model, models, "tiers", name, "tiers", index, "model")
    yield from _bad_canaries(config)
    asked = {*models, *config.tiers}
    for name, tenant in config.tenants.items():
        for other in (tenant.models or ()) if asked else ():  # else whatever a target knows
            yield from _unless_known(other, asked, "tenants", name, "models")
    if config.routing.default is not None:
        yield from _unless_known(config.routing.default, models, "routing", "default")


def _bad_canaries(config: Config) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for name, canary in config.canary.items():
        yield from _unless_known(canary.model, config.models, "canary", name, "model")
        others = [model for model in config.models if model != canary.model]
        yield from _unless_known(canary.candidate, others, "canary", name, "candidate")
        first = taken.setdefault(canary.model, name)
        if first != name:
            yield Problem(("canary", name, "model"), f"has the canary {first} already", f'"{canary.model}"')


def _unless_known(name: str, known: Collection[str], *path: str | int) -> Iterator[Problem]:
    if name not in known:
        yield Problem(path, did_you_mean(name, known), f'"{name}"')


def _same_address(server: Server, admin: Admin) -> bool:
    return server.port == admin.port != 0 and (
        server.host == admin.host or bool(_EVERYWHERE & {server.host, admin.host})
    )


def _caps(budget: BudgetOptions) -> bool:
    return any(getattr(budget, name) is not None for name in Caps.model_fields)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
