"""Whether a configuration would work, found out by making everything of it but sockets.

The same code builds it as when it is served, so that what passes here starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from resilient_llm.errors import ConfigurationError
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.sidecar.admin import admin_token
from resilient_llm.sidecar.build import build
from resilient_llm.sidecar.config import Config, load, located
from resilient_llm.sidecar.problems import ConfigError, Problem
from resilient_llm.streams import BufferedStream, LibraryErrors

__all__ = ["check"]


def check(path: Path, environ: Mapping[str, str] | None) -> str:
    """Give a few lines about what a file makes; with `environ=None` variables that are not set do not matter.

    Raises `ConfigError`.
    """
    with located(path):
        return _check(load(path), path, environ)


def _check(config: Config, path: Path, environ: Mapping[str, str] | None) -> str:
    if environ is None:
        environ = {name: f"placeholder-{name}" for name in _variables(config)}
        if config.store is not None:
            environ[config.store.redis_env] = "redis://localhost"
        keyless = {
            name: target.model_copy(update={"api_key_env": []}) for name, target in config.targets.items()
        }
        config = config.model_copy(update={"targets": keyless})
    else:
        _check_credentials(config, environ)
        admin_token(config.admin.token_env, environ)
    try:
        setup = build(config, _Nowhere(), environ=environ)
    except ConfigurationError as error:
        raise error if isinstance(error, ConfigError) else ConfigError([Problem((), str(error))]) from error
    models = ", ".join(setup.models) or "whatever callers ask for"
    return (
        f"{path}: OK\n"
        f"  targets  {', '.join(config.targets)}\n"
        f"  models   {models}\n"
        f"  tenants  {', '.join(config.tenants) or 'none: open to whoever reaches it'}\n"
        f"  policies {', '.join(policy.name for policy in setup.door.pipeline.describe().policies[1:])}"
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


class _Nowhere:
    """Stands where what sends requests would."""

    errors = LibraryErrors(timed_out=TimeoutError, broken=ConnectionError)

    async def __call__(self, request: Request) -> Reply:
        raise ConnectionError(request.method)

    def synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        return Reply(status, headers, BufferedStream([body]), complete=True)

    async def aclose(self) -> None:
        """Close nothing."""
