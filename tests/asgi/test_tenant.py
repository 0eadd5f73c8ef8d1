"""Who a request is from: headers that can be believed, functions of the scope, and what happens to the rest."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from resilient_llm import Bulkhead, ConfigurationError
from resilient_llm.asgi import ClientAddress, ResilienceMiddleware, TenantHeader
from resilient_llm.context import current
from tests.asgi.doubles import Spy
from tests.asgi.server import Connection, Headers, respond

pytestmark = pytest.mark.anyio


async def tell(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the tenant the app finds."""
    await respond(send, body=str(current.get().tenant).encode())


async def ask(
    *, headers: Headers = (), client: tuple[str, int] | None = ("192.0.2.7", 5), **options: Any
) -> Any:
    """Give the status and the tenant that the app saw, if it ran."""
    app = ResilienceMiddleware(tell, **{"tenant": "x-tenant-id", **options})
    connection = await Connection(headers=headers, client=client).run(app)
    if connection.error is not None:
        raise connection.error
    return connection.body.decode() if connection.status == 200 else connection.status


def header(*values: str) -> Headers:
    return [(b"X-Tenant-ID", value.encode()) for value in values]


@pytest.mark.parametrize("policies", [(), (Spy(),)], ids=["no policies", "policies"])
async def test_a_header_names_the_tenant(policies: Any) -> None:
    assert await ask(headers=header("acme"), policies=policies) == "acme"


@pytest.mark.parametrize(
    "values", [[], [""], ["  "], ["acme", "acme"], ["acme", "victim"], ["x" * 257]], ids=repr
)
@pytest.mark.parametrize("policies", [(), (Bulkhead(max_concurrent=1),)], ids=["no policies", "policies"])
async def test_without_a_clear_name_a_request_is_refused_or_goes_to_the_default(
    values: list[str], policies: Any
) -> None:
    assert await ask(headers=header(*values), policies=policies) == 401
    assert await ask(headers=header(*values), policies=policies, default_tenant="others") == "others"


async def test_a_function_of_the_scope_names_the_tenant() -> None:
    assert await ask(tenant=lambda scope: scope["method"]) == "GET"
    assert await ask(tenant=lambda _scope: None) == 401


async def test_it_may_be_async() -> None:
    async def look_up(scope: Scope) -> str | None:
        await anyio.sleep(0.1)
        return "acme" if scope["path"] == "/" else None

    assert await ask(tenant=look_up) == "acme"


async def test_what_it_raises_is_the_servers_to_see() -> None:
    def broken(scope: Scope) -> str:
        raise LookupError("no database")

    with pytest.raises(LookupError, match="no database"):
        await ask(tenant=broken, policies=[Spy()])


async def test_what_is_no_name_is_an_error_that_says_so() -> None:
    with pytest.raises(TypeError, match="tenant= gave int"):
        await ask(tenant=lambda _scope: 7)


async def test_tenants_need_not_be_told_apart() -> None:
    assert await ask(tenant=None) == "None"
    assert await ask(tenant=None, default_tenant="all") == "all"


async def known_from_a_database(name: str) -> bool:
    await anyio.sleep(0.1)
    return name == "acme"


@pytest.mark.parametrize(
    "known",
    [{"acme"}, ["acme"], lambda name: name == "acme", known_from_a_database],
    ids=["set", "list", "function", "async function"],
)
async def test_only_known_tenants_are_let_in(known: Any) -> None:
    assert await ask(headers=header("acme"), known_tenants=known) == "acme"
    assert await ask(headers=header("forged"), known_tenants=known) == 401
    assert await ask(headers=header("forged"), known_tenants=known, default_tenant="others") == "others"


async def test_a_header_counts_from_trusted_peers_only() -> None:
    source = TenantHeader("x-tenant-id", trusted_peers=["10.0.0.0/8", "2001:db8::1"])
    for peer in ("10.1.2.3", "::ffff:10.1.2.3", "2001:db8::1"):
        assert await ask(tenant=source, headers=header("acme"), client=(peer, 1)) == "acme"
    for stranger in ("192.0.2.7", "2001:db8::2", "not an address", ""):
        assert await ask(tenant=source, headers=header("acme"), client=(stranger, 1)) == 401
    assert await ask(tenant=source, headers=header("acme"), client=None) == 401


def forwarded(*values: str) -> Headers:
    return [(b"x-forwarded-for", value.encode()) for value in values]


@pytest.mark.parametrize(
    ("client", "values", "address"),
    [
        ("10.0.0.1", ["198.51.100.4"], "198.51.100.4"),
        ("10.0.0.1", ["1.2.3.4, 198.51.100.4"], "198.51.100.4"),
        ("10.0.0.1", ["1.2.3.4", "198.51.100.4, 10.0.0.2"], "198.51.100.4"),
        ("10.0.0.1", ["198.51.100.4:3456"], "198.51.100.4"),
        ("10.0.0.1", ["[2001:db8::9]:3456"], "2001:db8::9"),
        ("10.0.0.1", ["2001:db8::9"], "2001:db8::9"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.3,, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["1.2.3.4, unknown"], None),
        ("198.51.100.4", ["1.2.3.4"], "198.51.100.4"),
        (None, ["1.2.3.4"], None),
    ],
)
def test_the_client_is_the_nearest_address_nobody_could_forge(
    client: str | None, values: list[str], address: str | None
) -> None:
    source = ClientAddress(trusted_peers=["10.0.0.0/8"])
    scope = {"client": None if client is None else (client, 1), "headers": forwarded(*values)}
    assert source(scope) == address


@pytest.mark.parametrize("peers", ["10.0.0.0/8", ["somewhere"], ["10.0.0.1/8"]], ids=repr)
def test_peers_that_are_none_are_refused(peers: Any) -> None:
    with pytest.raises(ConfigurationError, match="trusted_peers="):
        ClientAddress(trusted_peers=peers)
