"""The configuration of a sidecar, how a file becomes one, and the keys of its tenants.

Values only, and none of them a secret: keys are in the environment, or hashed. What is made of them is `build`'s.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from resilient_llm.sidecar import formats
from resilient_llm.sidecar.files import content
from resilient_llm.sidecar.fit import misfits
from resilient_llm.sidecar.options import (
    BudgetOptions,
    BulkheadOptions,
    CacheOptions,
    CanaryOptions,
    HedgeOptions,
    QuotaOptions,
    RetryOptions,
    RoutingOptions,
    Section,
    StreamOptions,
)
from resilient_llm.sidecar.problems import ConfigError, Problem, problems_of
from resilient_llm.sidecar.tables import (
    Admin,
    Model,
    Server,
    Store,
    TargetOptions,
    Telemetry,
    Tenant,
    VirtualModel,
)
from resilient_llm.sidecar.toml_lines import lines_of

__all__ = ["Config", "key_hashes", "load", "located", "made_of", "parse", "read", "text_of"]


class Config(Section):
    """All of a sidecar's configuration."""

    server: Server = Server()
    admin: Admin = Admin()
    tenants: dict[str, Tenant] = Field(default_factory=dict)
    targets: Annotated[dict[str, TargetOptions], Field(min_length=1)]
    models: dict[str, Model] = Field(default_factory=dict)
    tiers: dict[str, VirtualModel] = Field(default_factory=dict)
    canary: dict[str, CanaryOptions] = Field(default_factory=dict)
    routing: RoutingOptions = RoutingOptions()
    retry: RetryOptions = RetryOptions()
    hedge: HedgeOptions | None = None
    stream: StreamOptions = StreamOptions()
    cache: CacheOptions | None = None
    bulkhead: BulkheadOptions = BulkheadOptions()
    quota: QuotaOptions | None = None
    """Of each tenant without one of its own."""
    budget: BudgetOptions | None = None
    store: Store | None = None
    telemetry: Telemetry = Telemetry()

    def redacted(self) -> dict[str, object]:
        """Give all of it for operators to see: names of variables, and no hashes of keys or values of headers."""
        shown = self.model_dump(exclude_none=True)
        for tenant in shown["tenants"].values():
            tenant["key_sha256"] = [f"{digest[:6]}..." for digest in tenant["key_sha256"]]
        for target in shown["targets"].values():
            target["headers"] = dict.fromkeys(target["headers"], "...")
        return shown


def load(path: str | Path) -> Config:
    """Read a configuration from a file. Raises `ConfigError`, with file and line."""
    return parse(text_of(Path(path)), file=str(path))


def text_of(path: Path) -> bytes:
    """Read a configuration's file. Raises `ConfigError`."""
    try:
        return content(path)
    except OSError as error:
        raise ConfigError([Problem((), f"cannot be read: {error.strerror}")], file=str(path)) from error


@contextmanager
def located(path: str | Path) -> Iterator[None]:
    """Say of a `ConfigError` raised inside in which line of a file it is, as far as that can be found out."""
    try:
        yield
    except ConfigError as error:
        if error.file is not None:
            raise
        try:
            lines = lines_of(content(Path(path)).decode("utf-8-sig"))
        except (OSError, ValueError):
            lines = {}
        raise ConfigError(error.problems, file=str(path), lines=lines) from error


def parse(text: bytes | str, *, file: str | None = None) -> Config:
    """Read a configuration from TOML. Raises `ConfigError`."""
    document, lines = read(text, file=file)
    try:
        return made_of(document)
    except ConfigError as error:
        raise ConfigError(error.problems, file=file, lines=lines) from None


def read(
    text: bytes | str, *, file: str | None = None
) -> tuple[dict[str, Any], Mapping[tuple[str | int, ...], int]]:
    """Read TOML, and in which line each key stands. Raises `ConfigError`."""
    try:
        # Some editors begin a file with a byte order mark, which tomllib does not know.
        source = (text.decode("utf-8") if isinstance(text, bytes) else text).removeprefix("\ufeff")
        document = tomllib.loads(source)
    except UnicodeDecodeError as error:
        raise ConfigError(
            [Problem((), f"not UTF-8: {error.reason} at byte {error.start}")], file=file
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a bare `ValueError`
        raise ConfigError([Problem((), f"not TOML: {error}")], file=file) from None
    return document, lines_of(source)


def made_of(document: Mapping[str, Any]) -> Config:
    """Make a configuration of what was read. Raises `ConfigError`, without file and lines."""
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError(problems_of(error, Config)) from None
    if problems := list(misfits(config)):
        raise ConfigError(problems)
    return config


def key_hashes(config: Config, environ: Mapping[str, str] = os.environ) -> dict[bytes, str]:
    """Give the tenants by the SHA-256 of their keys.

    Raises `ConfigError` for variables that are not set, and for keys that two have, be one of them the operators'.
    """
    found: dict[bytes, str] = {}
    problems: list[Problem] = []
    for name, tenant in config.tenants.items():
        keys = [bytes.fromhex(digest) for digest in tenant.key_sha256]
        for variable in tenant.key_env:
            key = environ.get(variable, "").strip()
            why = formats.fault_of_key(key)
            if why is not None:
                problems.append(
                    Problem(("tenants", name, "key_env"), f"the environment variable {variable} {why}")
                )
                continue
            keys.append(hashlib.sha256(os.fsencode(key)).digest())
        taken = [owner for digest in keys if (owner := found.setdefault(digest, name)) != name]
        problems += [
            Problem(("tenants", name), f"has a key that tenant {owner} has too; each needs its own")
            for owner in taken
        ]
    token = config.admin.token_env
    if token is not None:
        whose = found.get(hashlib.sha256(os.fsencode(environ.get(token, "").strip())).digest())
        if whose is not None:
            why = f"the environment variable {token} has a key of tenant {whose}, who would be an operator"
            problems.append(Problem(("admin", "token_env"), why))
    if problems:
        raise ConfigError(problems)
    return found
