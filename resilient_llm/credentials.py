"""A secret that opens a target: where it comes from, what it may be used for, and how much.

Values only, and none of them ever shows the secret. Which credential a call uses is `core.credential_pool`'s to
decide, and how it is written into a request `routing.rewrite`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction

from resilient_llm.errors import ConfigurationError

__all__ = ["Credential"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIKE_A_SECRET = re.compile(r"(?=.*[a-z])(?=.*[0-9]).{20,}")  # keys of Google and Groq could be names, too
_SECRET = re.compile(r"[!-~]+")  # what a header may hold, without blanks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credential:
    """One key of an account, read each time it is used.

    It is in the environment variable `env`, or what `value()` gives, which must not take long: how long a token is
    kept is the function's business. `name` is for telemetry and errors; by default that of the variable. `purposes`
    (batch, realtime, canary ...) are those it is kept for; without any it is for every call. At most
    `max_concurrent` calls use it at once, and `requests_per_minute` in a minute.

    Raises `ConfigurationError` for options that cannot be, never with a secret in it.
    """

    env: str | None = None
    value: Callable[[], str] | None = field(default=None, repr=False)
    name: str = ""
    purposes: Collection[str] = frozenset()
    max_concurrent: int | None = None
    requests_per_minute: float | None = None

    def __post_init__(self) -> None:
        if (self.env is None) == (self.value is None):
            raise ConfigurationError(
                "a Credential needs one of env= (a variable's name) and value= (a function)"
            )
        # Somebody will give the secret itself; then no error may repeat it.
        if self.env is not None and not _is_variable(self.env):
            raise ConfigurationError(
                "env=...: not the name of an environment variable; the secret goes into it"
            )
        if self.value is not None and (
            not callable(self.value) or isinstance(self.value, type) or iscoroutinefunction(self.value)
        ):
            raise ConfigurationError(
                "value=...: allowed are functions that give the secret, not the secret itself"
            )
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise ConfigurationError(f"name={self.name!r}: allowed are printable strings")
        purposes = self.purposes
        if (
            isinstance(purposes, str | bytes | Mapping)
            or not isinstance(purposes, Collection)
            or not all(isinstance(purpose, str) and purpose for purpose in purposes)
        ):
            raise ConfigurationError(f"purposes={self.purposes!r}: allowed are sets of strings, not empty")
        most, rate = self.max_concurrent, self.requests_per_minute
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or not 0 < most < 1e12):
            raise ConfigurationError(f"max_concurrent={most!r}: allowed are whole numbers from 1, and None")
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e12
        ):
            raise ConfigurationError(
                f"requests_per_minute={rate!r}: allowed are finite numbers above 0, and None"
            )
        object.__setattr__(self, "purposes", frozenset(self.purposes))
        object.__setattr__(self, "name", self.name or self.env or "credential")

    def secret(self) -> str:
        """Give the secret.

        Raises `ConfigurationError`, which names the credential and its variable, when there is none or it is nothing
        that can be sent; the cause is what the function raised.
        """
        if self.env is not None:
            found: object = os.environ.get(self.env)
            if not found:
                raise ConfigurationError(
                    f"credential {self.name!r}: the environment variable {self.env} is not set"
                )
        else:
            assert self.value is not None  # noqa: S101 - one of both is there
            try:
                found = self.value()
            except Exception as error:
                msg = f"credential {self.name!r}: its function failed with {type(error).__name__}"
                raise ConfigurationError(msg) from error
        if not isinstance(found, str):
            raise ConfigurationError(
                f"credential {self.name!r}: a string is expected, not {type(found).__name__}"
            )
        secret = found.strip()  # a line break at its end came with the file it was in
        if not _SECRET.fullmatch(secret):
            where = "" if self.env is None else f"the environment variable {self.env} "
            raise ConfigurationError(
                f"credential {self.name!r}: {where}{_fault_of(secret)}; allowed are visible ASCII characters"
            )
        return secret


def _fault_of(secret: str) -> str:
    """Say what is in a secret that no header can hold, and nothing of the secret."""
    if not secret:
        return "has nothing but blanks"
    if "\r" in secret or "\n" in secret:
        return "has a line break in it"
    return "has a blank in it" if " " in secret else "has a character in it that no header can hold"


def _is_variable(name: object) -> bool:
    if not isinstance(name, str):
        return False
    return _VARIABLE.fullmatch(name) is not None and _LIKE_A_SECRET.fullmatch(name) is None
