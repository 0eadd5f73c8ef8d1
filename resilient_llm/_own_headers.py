"""Which headers a target may send of its own: none that a connection or a body decides, and each once.

Names and values only; in what order they go out, and in whose place, is `routing`'s to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from resilient_llm.errors import ConfigurationError
from resilient_llm.message import DIGESTS

__all__ = ["check_auth", "check_own"]

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[ -~]*")
_HOST = re.compile(r"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")

# RFC 9110, 7.6.1 and 10.1.1
_OF_THE_CONNECTION = frozenset(
    {
        "connection",
        "expect",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OF_THE_BODY = frozenset({"content-encoding", "content-length", *(name.decode() for name in DIGESTS)})


def check_auth(auth: object) -> None:
    """Check the name of the header that a secret goes out in; raises `ConfigurationError`, without it."""
    lower = str(auth).lower()
    if not _matches(_NAME, auth) or _decided_by(lower) is not None or lower == "host":
        raise ConfigurationError(
            "auth=...: allowed are 'bearer', names of headers that a secret can be sent in, and None"
        )


def check_own(headers: object, auth: str | None) -> dict[str, str]:
    """Give the headers of a target as a `dict`; raises `ConfigurationError` for any that cannot be sent each time.

    `auth` is the header of its secret, if that is known. An error shows no value that may be a secret.
    """
    if not isinstance(headers, Mapping):
        raise ConfigurationError(
            f"headers=... is of type {type(headers).__name__}; allowed are mappings of names to values"
        )
    own: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for name, value in headers.items():
        if not _matches(_NAME, name) or not _matches(_VALUE, value):
            raise ConfigurationError(f"headers: {name!r} is no header that can be sent")
        lower = name.lower()
        decided = _decided_by(lower)
        if decided is not None:
            raise ConfigurationError(f"headers[{name!r}]={value!r}: cannot be given, {decided}")
        if lower == "host" and not _HOST.fullmatch(value):
            raise ConfigurationError(
                f"headers[{name!r}]={value!r}: allowed are a host, and a host with a port"
            )
        if lower in spelled:
            raise ConfigurationError(f"headers: {name!r} is there twice, as {spelled[lower]!r} too")
        if auth is not None and lower == auth.lower():
            raise ConfigurationError(f"headers: {name!r} is what the secret goes out in, as auth says")
        spelled[lower] = name
        own[name] = value
    return own


def _decided_by(name: str) -> str | None:
    """Say what decides a header (lower case) that nobody can give; `None` for any other."""
    if name in _OF_THE_CONNECTION:
        return "since each connection decides it"
    return "since the body of each request decides it" if name in _OF_THE_BODY else None


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
