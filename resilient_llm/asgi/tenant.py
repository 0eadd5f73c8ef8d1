"""Who a request is from.

A tenant comes from what the request has proved (a key, a session), or from a header that only a trusted
proxy can have set. What a tenant may do is the policies' to decide, not this room's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias, TypeVar

import anyio
from starlette.types import Scope

from resilient_llm._options import names, synchronous, takes
from resilient_llm.errors import ConfigurationError, RejectedError, UnknownTenantError

__all__ = ["ClientAddress", "Known", "TenantHeader", "TenantOf", "Tenants"]

TenantOf: TypeAlias = Callable[[Scope], str | Awaitable[str | None] | None]
"""Gives a request's tenant, or `None` (or an empty string) when it has none; may be async."""

Known: TypeAlias = Collection[str] | Callable[[str], bool | Awaitable[bool]]
"""The tenants there are: a collection, or a function that tells whether there is such a one; may be async."""

_HEADER = re.compile("[!-9;-~]+")
_MAX_LENGTH = 256  # names are kept as keys and written to spans; whoever sends longer ones is not a tenant

T = TypeVar("T")

_Address: TypeAlias = IPv4Address | IPv6Address


class _Peers:
    """Tell whether an address is one of the trusted ones."""

    __slots__ = ("_networks",)

    def __init__(self, trusted_peers: Sequence[str]) -> None:
        if isinstance(trusted_peers, str):
            msg = (
                f"trusted_peers={trusted_peers!r}: a list of addresses or networks is wanted, not one string"
            )
            raise ConfigurationError(msg)
        names(trusted_peers=trusted_peers)
        try:
            self._networks: list[IPv4Network | IPv6Network] = [ip_network(peer) for peer in trusted_peers]
        except ValueError as error:
            msg = f"trusted_peers={trusted_peers!r}: {error}"
            raise ConfigurationError(msg) from None

    def __contains__(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


class TenantHeader:
    """Read the tenant from a header, and believe it only from `trusted_peers`.

    `trusted_peers` are the addresses and networks (`"10.0.0.0/8"`) of the proxies that set the header and
    remove what the client sent; a request from elsewhere has no tenant, whatever it says. With `None` every
    peer is believed, which is right only where clients cannot reach the server themselves. A header that
    comes more than once names nobody.
    """

    def __init__(self, name: str, *, trusted_peers: Sequence[str] | None = None) -> None:
        if not isinstance(name, str) or not _HEADER.fullmatch(name):
            raise ConfigurationError(f"tenant={name!r}: allowed are names of headers")
        self._name = name.lower().encode("ascii")
        self._peers = None if trusted_peers is None else _Peers(trusted_peers)

    def __call__(self, scope: Scope) -> str | None:
        """Give the tenant the header names, or `None`."""
        if self._peers is not None and _peer(scope) not in self._peers:
            return None
        values = _values(scope, self._name)
        return values[0].strip() if len(values) == 1 else None


class ClientAddress:
    """Take the client's address for the tenant, as the first hop of `X-Forwarded-For` nobody can forge.

    Read from the right, past the `trusted_peers`: the nearest address that none of them has is the client's,
    and what stands left of it is only what the client says.
    """

    def __init__(self, *, trusted_peers: Sequence[str] = ()) -> None:
        self._peers = _Peers(trusted_peers)

    def __call__(self, scope: Scope) -> str | None:
        """Give the client's address, or `None` where the server knows none."""
        address = _peer(scope)
        hops = ",".join(_values(scope, b"x-forwarded-for")).split(",")
        while address in self._peers and hops:
            hop = hops.pop().strip()
            if hop:
                address = _parse(hop)
        return None if address is None else str(address)


class TenantLookupError(RejectedError):
    """It could not be found out in time who asks."""

    reason = "tenant_lookup"


class Tenants:
    """Find a request's tenant and make sure of it.

    Raises `UnknownTenantError` for a request without a tenant, or with one that is not `known`, unless there
    is a `default` for those.
    """

    def __init__(
        self, source: str | TenantOf | None, *, known: Known | None, default: str | None, timeout: float
    ) -> None:
        if isinstance(source, str):
            source = TenantHeader(source)
        elif source is not None and (not callable(source) or isinstance(source, type)):
            msg = f"tenant={source!r}: allowed are the name of a header, a function of the scope, or None"
            raise ConfigurationError(msg)
        if known is not None and (isinstance(known, type) or not callable(known)):
            _known_names(known)
        synchronous(coroutines=True, tenant=source, known_tenants=known)
        takes(1, tenant=source, known_tenants=known)
        self._source = source
        self._known = known
        self._default = default
        self._timeout = timeout

    async def __call__(self, scope: Scope) -> str | None:
        """Give the tenant of a request; `None` where tenants are not told apart."""
        if self._source is None:
            return self._default
        tenant = self._source(scope)
        if inspect.isawaitable(tenant):
            tenant = await self._in_time(tenant)
        if not tenant:
            return self._or_default("the request names no tenant")
        if not isinstance(tenant, str):
            raise TypeError(f"tenant= gave {type(tenant).__name__}, where a str or None is wanted")
        if len(tenant) > _MAX_LENGTH or not await self._is_known(tenant):
            return self._or_default("the request names a tenant that is not known")
        return tenant

    async def _is_known(self, tenant: str) -> bool:
        known = self._known
        if known is None:
            return True
        if not callable(known):
            return tenant in known
        answer = known(tenant)
        return await self._in_time(answer) if inspect.isawaitable(answer) else answer

    async def _in_time(self, answer: Awaitable[T]) -> T:
        with anyio.move_on_after(self._timeout):
            return await answer
        raise TenantLookupError(
            f"the tenant was not found out within {self._timeout:g} s", retry_after=1, name="tenant"
        )

    def _or_default(self, why: str) -> str:
        if self._default is None:
            raise UnknownTenantError(why, name="tenant")
        return self._default


def _known_names(known: object) -> None:
    """Raise `ConfigurationError` unless these are names of tenants, as the keys of a mapping may be."""
    if (
        isinstance(known, str | bytes | type)
        or not isinstance(known, Collection)
        or not all(isinstance(name, str) and name for name in known)
    ):
        raise ConfigurationError(
            f"known_tenants={known!r}: allowed are collections of names, none of them empty, and functions of a name"
        )


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _peer(scope: Scope) -> _Address | None:
    client = scope.get("client")
    return _parse(client[0]) if client else None


def _parse(text: str) -> _Address | None:
    """Read an address, with or without a port; an IPv4 one in IPv6's clothes is the IPv4 one."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
