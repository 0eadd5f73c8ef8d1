"""Whether a configuration would work, found out by making everything of it but sockets.

The same code builds it as when it is served, so that what passes here starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from resilient_llm.message import Headers, Reply, Request
from resilient_llm.sidecar.admin import admin_token
from resilient_llm.sidecar.build import Setup, build
from resilient_llm.sidecar.config import Config, load, located, made_of, read
from resilient_llm.sidecar.files import content
from resilient_llm.sidecar.observability import load_exporter
from resilient_llm.sidecar.options import BudgetOptions
from resilient_llm.sidecar.problems import ConfigError, Problem
from resilient_llm.sidecar.stand_ins import StandIns
from resilient_llm.sidecar.tls import LISTENERS, Certificates
from resilient_llm.streams import BufferedStream, LibraryErrors

if TYPE_CHECKING:
    from resilient_llm.sidecar.tables import TLS

__all__ = ["Nowhere", "built", "check", "notes"]


def check(path: Path, environ: Mapping[str, str] | None) -> str:
    """Give a few lines about what a file makes; with `environ=None` variables that are not set do not matter.

    Raises `ConfigError` with all that is wrong. Of a table, target, tenant, model, tier or canary only the first kind
    of fault is told: what is made of it is not looked at before its types are right. Where a table is not known, or
    there is no target, only what was found by then.
    """
    try:
        with located(path):
            config = load(path)
            setup = _made(config, path, environ)
    except ConfigError as error:
        raise _with_all_others(error, path, environ) from error
    models = ", ".join(setup.models) or "whatever callers ask for"
    policies = setup.door.pipeline.describe().policies
    lines = [
        f"{path}: OK",
        f"  targets  {', '.join(config.targets)}",
        f"  models   {models}",
        f"  tenants  {', '.join(config.tenants) or 'none: open to whoever reaches it'}",
        f"  policies {', '.join(policy.name for policy in policies)}",
    ]
    if config.server.workers > 1:
        lines.append(f"  workers  {config.server.workers}")
        lines += [f"  note     {note}" for note in notes(config)]
    lines += [f"  note     {note}" for note in _unpriced(config)]
    return "\n".join(lines)


def _made(config: Config, path: Path, environ: Mapping[str, str] | None) -> Setup:
    setup = built(config, path, environ)
    load_exporter(config)
    return setup


def _with_all_others(error: ConfigError, path: Path, environ: Mapping[str, str] | None) -> ConfigError:
    """Give the error with what else is wrong: found by having something right stand where the faults are."""
    try:
        document, lines = read(content(path))
    except (OSError, ConfigError):
        return error
    stand_ins = StandIns(document, Config.model_fields)
    problems = found = error.problems
    while stand_ins.replace(found):
        try:
            _made(made_of(stand_ins.document), path, environ)
        except ConfigError as other:
            found = other.problems
            problems += found
        else:
            break
    return ConfigError(list(dict.fromkeys(problems)), file=str(path), lines=lines)


def built(
    config: Config, path: Path, environ: Mapping[str, str] | None, *, previous: Setup | None = None
) -> Setup:
    """Make everything of a configuration that came from a file, for nobody to use; in the place of `previous`.

    Raises `ConfigError`.
    """
    placeholders: dict[str, str] = {}
    if environ is None:
        environ = placeholders = {name: f"placeholder-{name}" for name in _variables(config)}
        if config.store is not None:
            environ[config.store.redis_env] = "redis://localhost"
        keyless = {
            name: target.model_copy(update={"api_key_env": []}) for name, target in config.targets.items()
        }
        config = config.model_copy(update={"targets": keyless})
    else:
        _check_credentials(config, environ)
        admin_token(config.admin.token_env, environ)
    for listener in LISTENERS:
        tls: TLS | None = getattr(config, listener).tls
        if tls is not None and tls.key_password_env not in placeholders:
            Certificates(listener, tls, path.parent, environ)
    return build(config, Nowhere(), previous=previous, environ=environ)


def notes(config: Config) -> Iterator[str]:
    """Say what several workers do not share, of what the configuration has."""
    shared = set() if config.store is None else set(config.store.share)
    tenants = config.tenants.values()
    present = {
        "bulkheads": config.bulkhead.enabled or any(tenant.bulkhead for tenant in tenants),
        "quotas": config.quota is not None
        or any(tenant.quota for tenant in tenants)
        or any(target.quota or target.tier for target in config.targets.values()),
        "budgets": config.budget is not None or any(tenant.budget for tenant in tenants),
        "circuits": True,
        "cache": config.cache is not None,
    }
    if alone := [name for name, is_there in present.items() if is_there and name not in shared]:
        yield (
            f"each worker counts for itself: {', '.join(alone)}; up to {config.server.workers} times what the "
            "file says is let through in all. A [store] shares them"
        )


def _unpriced(config: Config) -> Iterator[str]:
    """Say whose calls a budget refuses, since nobody knows their price."""
    budget = config.budget or BudgetOptions()
    if config.budget is None and not any(tenant.budget for tenant in config.tenants.values()):
        return
    routes = [route for model in config.models.values() for route in model.targets]
    asked = {route.target for route in routes if route.price is None} if routes else set(config.targets)
    names = [name for name, target in config.targets.items() if target.price is None and name in asked]
    if names and budget.unpriced == "refuse" and not budget.dry_run and find_spec("genai_prices") is None:
        yield (
            f"a budget refuses calls without a price, and of {', '.join(names)} the file has none. "
            "pip install 'resilient-llm[prices]' brings published ones"
        )


def _check_credentials(config: Config, environ: Mapping[str, str]) -> None:
    problems = [
        Problem(("targets", name, "api_key_env"), f"the environment variable {variable} is not set")
        for name, target in config.targets.items()
        for variable in target.api_key_env
        if not environ.get(variable)
    ]
    if problems:
        raise ConfigError(problems)


def _variables(config: Config) -> Iterator[str]:
    for tenant in config.tenants.values():
        yield from tenant.key_env
    if config.store is not None:
        yield config.store.redis_env
    for tls in (config.server.tls, config.admin.tls):
        if tls is not None and tls.key_password_env is not None:
            yield tls.key_password_env


class Nowhere:
    """Stand where what sends requests would. Satisfies `Engine`."""

    errors = LibraryErrors(timed_out=TimeoutError, broken=ConnectionError)

    async def __call__(self, request: Request) -> Reply:
        """Raise `ConnectionError`."""
        raise ConnectionError(request.method)

    def synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        """Make a reply that no provider gave."""
        return Reply(status, headers, BufferedStream([body]), complete=True)

    async def aclose(self) -> None:
        """Close nothing."""
