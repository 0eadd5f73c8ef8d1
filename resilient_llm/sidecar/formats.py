"""What strings of a configuration have to look like: names of variables, origins, URLs, headers without secrets.

Each check gives what it was given, or raises `ValueError` with what is expected, for pydantic to say where; but for
that of keys, which are not in the file.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from resilient_llm.message import has_controls
from resilient_llm.sidecar.auth import MIN_KEY

__all__ = ["fault_of_key", "headers", "host", "http_url", "origins", "variables"]

_VARIABLE = re.compile(r"[A-Z_a-z][A-Za-z0-9_]*")
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[(?P<address>[0-9a-f:.]+)\]|[a-z0-9._~!$&'()+,;=%-]+)"
    r"(?::(?P<port>[1-9][0-9]{0,4}))?"
)
_PORTS = {"http": "80", "https": "443"}
"""Those that browsers leave out."""
_HTTP_URL = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[^/?#@\s:\[\]]+)(?::(?P<port>[0-9]{1,5}))?(?:/[^?#\s]*)?"
)
_LAST_PORT = 65_535
_HOST_NAME = re.compile(r"(?=.{1,253}\.?$)(?:[A-Za-z0-9_-]{1,63}\.)*(?![0-9]+\.?$)[A-Za-z0-9_-]{1,63}\.?")
_SECRET_HEADER = re.compile(
    r"(^|[-_])(authorization|cookie|api[-_]?key|token|secret|password)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\s*(Bearer |Basic |sk-|gsk_|AIza)", re.IGNORECASE)

_Names = TypeVar("_Names", bound=Sequence[str])
_Headers = TypeVar("_Headers", bound=Mapping[str, str])


def fault_of_key(key: str, what: str = "key") -> str | None:
    """Say what is wrong with a key that callers are to show, and nothing of it; `None` for one that they can."""
    if not key:
        return "is not set"
    if len(key) < MIN_KEY:
        return f"has a {what} of less than {MIN_KEY} characters"
    if has_controls(os.fsencode(key)):
        return f"has a {what} with a line break or another control character in it, which nobody can send"
    return None


def variables(names: _Names) -> _Names:
    """Check names of environment variables, in the place of which some write the secret."""
    if not all(_VARIABLE.fullmatch(name) for name in names):
        raise ValueError("the name of an environment variable is expected, not the secret itself")
    return names


def host(given: str) -> str:
    """Check what a socket is bound to: an address, or a name, of which the last part is no number (RFC 1123, 2.1)."""
    try:
        ipaddress.ip_address(given)
    except ValueError:
        if _HOST_NAME.fullmatch(given) is None:
            raise ValueError(
                "an address or a host's name is expected, without port or brackets, such as 127.0.0.1 or ::1; "
                "all of IPv4 is 0.0.0.0"
            ) from None
    return given


def origins(given: _Names) -> _Names:
    """Check origins of pages (RFC 6454), which are compared as they are written."""
    if not all(map(_is_origin, given)):
        raise ValueError(
            'origins are expected as browsers send them, in lower case and each by itself: "https://app.example"'
        )
    return given


def _is_origin(given: str) -> bool:
    found = _ORIGIN.fullmatch(given)
    if found is None:
        return False
    if found["address"] is not None and not _is_ipv6(found["address"]):
        return False
    port = found["port"]
    return port is None or (int(port) <= _LAST_PORT and port != _PORTS.get(found["scheme"]))


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def http_url(url: str) -> str:
    """Check the base URL of a collector; a password in it would be a secret in the file."""
    found = _HTTP_URL.fullmatch(url)
    if found is None or not 0 < int(found["port"] or 1) <= _LAST_PORT:
        raise ValueError(
            'the URL of a collector that takes OTLP over HTTP is expected: "http://collector:4318"'
        )
    return url


def headers(given: _Headers) -> _Headers:
    """Check that headers are none that carry a key."""
    for name, value in given.items():
        if _SECRET_HEADER.search(name) or _SECRET_VALUE.match(value):
            raise ValueError(
                f"{name} looks like a secret, and secrets do not stand in this file: put it in an environment "
                f'variable, name that in api_key_env, and give auth = "{name}"'
            )
    return given
