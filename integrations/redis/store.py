"""One store for all workers and machines: on a single server, found by Sentinels, or spread over a cluster."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import Sentinel

from resilient_llm.stores import RedisStore


def single(url: str, **options: Any) -> RedisStore:
    """Use one server: `redis://user:password@host:6379/0`, or `rediss://` for TLS."""
    return RedisStore(url, **options)


def sentinel(url: str, **options: Any) -> RedisStore:
    """Ask Sentinels who is the primary: `redis+sentinel://user:password@one:26379,two:26379,three:26379/service`.

    User and password are those of the primary. After a failover calls meet what `on_store_error` says until the
    Sentinels have agreed on another one.
    """
    where = urlsplit(url)
    credentials, _, addresses = where.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    hosts = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in addresses.split(","))]
    quickly = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
    sentinels = Sentinel(hosts, sentinel_kwargs=quickly)  # type: ignore[no-untyped-call]
    primary: Redis = sentinels.master_for(
        where.path.strip("/"),
        username=unquote(user) or None,
        password=unquote(password) or None,
        socket_connect_timeout=1.0,
    )
    return RedisStore(primary, **options)


def cluster(url: str, **options: Any) -> RedisStore:
    """Use a cluster: `redis+cluster://user:password@any-node:6379`; the others are found from there.

    What one decision is about lies on one node. Limits that are decided on together are together; those of a single
    key each, such as one per tenant, are spread over all nodes.
    """
    nodes = RedisCluster.from_url(
        url.replace("redis+cluster://", "redis://", 1),
        socket_connect_timeout=1.0,
    )
    return RedisStore(nodes, **options)


def store_of(url: str, **options: Any) -> RedisStore:
    """Make the store that a URL names by its scheme."""
    makers = {"redis+sentinel": sentinel, "redis+cluster": cluster}
    return makers.get(urlsplit(url).scheme, single)(url, **options)


async def close(store: RedisStore) -> None:
    """Send what is still to be settled, and close the connections, also those of a client that was made here."""
    client: Any = store.runner.client
    await store.aclose()
    await client.aclose()
    sentinels = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for each in sentinels.sentinels if sentinels else ():
        await each.aclose()
