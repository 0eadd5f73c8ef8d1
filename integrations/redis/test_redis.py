"""The service of this folder on real servers: one alone, Sentinels, a cluster; and with no more rights than needed."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import httpx2
import pytest

import resilient_llm.stores
from integrations.redis.app import create_app
from integrations.redis.memory import measure
from integrations.redis.store import close, store_of
from resilient_llm import (
    AttemptError,
    Budget,
    Bulkhead,
    CircuitBreaker,
    ConcurrencyLimit,
    Pipeline,
    Policy,
    Price,
    RateLimit,
    ambient,
)
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.policies.cache import Cache
from resilient_llm.stores import RedisStore
from resilient_llm.testing import ASGIStreamTransport, FakeModel, FakeProvider, Fault, Latency
from tests.stores.cluster import cluster_of_three, wait_for
from tests.stores.conftest import KINDS, Server
from tests.support import until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

FOLDER = Path(__file__).parent
ACL = (FOLDER / "resilient_llm.acl").read_text()
PASSWORD = "of this test"
MODEL = "gpt-4o-mini"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@contextmanager
def running(kind: str, folder: Path, *options: str) -> Iterator[Server]:
    server = Server(kind, folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    with running(kind, tmp_path) as server:
        yield server.url


# The service


@asynccontextmanager
async def worker(url: str, provider: FakeProvider) -> AsyncIterator[httpx.AsyncClient]:
    # A machine that is busy with other tests may be slow to answer.
    app = create_app(provider.httpx2_transport(), url, store_timeout=10.0)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=ASGIStreamTransport(app), base_url="http://app", timeout=30) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, tenant: str = "acme") -> httpx.Response:
    return await client.post("/chat", json={"message": "Why?"}, headers={"x-tenant": tenant})


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://provider.example/v1")
    return FakeProvider(FakeModel(latency=Latency(headers=0.5)))


async def refuses_untried(client: httpx.AsyncClient, provider: FakeProvider) -> bool:
    """Tell whether a call is refused without the provider hearing of it."""
    asked = len(provider.requests)
    return (await ask(client, "another")).status_code == 503 and len(provider.requests) == asked


async def test_workers_share_slots_and_circuits(url: str, provider: FakeProvider) -> None:
    async with worker(url, provider) as one, worker(url, provider) as two:
        statuses: Counter[int] = Counter()
        async with anyio.create_task_group() as tasks:

            async def noise(client: httpx.AsyncClient) -> None:
                statuses[(await ask(client)).status_code] += 1

            for _ in range(5):
                tasks.start_soon(noise, one)
                tasks.start_soon(noise, two)
            await until(lambda: len(provider.requests) >= 4)
            assert len(provider.requests) == 4  # of the ten, in both workers
            assert (await ask(one, "quiet")).status_code == 200
        assert statuses[200] >= 5

        provider.script(MODEL, lambda _request: Fault(status=500))
        for number in range(3):
            assert (await ask(one, f"tenant-{number}")).status_code in (502, 503)
        provider.script(MODEL, [])
        await until(partial(refuses_untried, two, provider))  # it has not failed there
        ready = (await two.get("/ready")).json()
        assert ready["store"] == "asked"
        assert ready["workers"] in (1, 2)


# Wiring


async def one_decision(store: RedisStore) -> None:
    limit = RateLimit(requests_per_minute=60, store=store)

    async def work() -> int:
        return 1

    try:
        with ambient(tenant="acme"):
            assert await Pipeline([limit]).run(work) == 1
        assert (store.guard.unguarded, store.guard.closed) == (0, True)
    finally:
        await close(store)


async def test_a_single_server(url: str) -> None:
    await one_decision(store_of(url, on_store_error="closed", timeout=2.0))


async def test_a_cluster(kind: str, tmp_path: Path) -> None:
    with cluster_of_three(kind, tmp_path) as nodes:
        for node in nodes:  # any of them will do
            url = f"redis+cluster://127.0.0.1:{node.port}"
            await one_decision(store_of(url, on_store_error="closed", timeout=2.0))


async def test_a_failover_that_sentinels_decide_on(kind: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("primary", "replica", "sentinel")]
    for folder in folders:
        folder.mkdir()
    with (
        running(kind, folders[0]) as primary,
        running(kind, folders[1], "--replicaof", "127.0.0.1", str(primary.port)) as replica,
    ):
        wait_for(lambda: replica.admin.info("replication")["master_link_status"] == "up", "the replica")
        with running_sentinel(kind, folders[2], primary) as sentinel:
            wait_for(
                lambda: len(sentinel.admin.execute_command("SENTINEL", "REPLICAS", "llm")) == 1,
                "the sentinel",
            )
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/llm"
            store = store_of(url, on_store_error="open", timeout=0.25)
            pipeline = Pipeline([RateLimit(requests_per_minute=6_000, store=store)])
            answered = 0

            async def work() -> None:
                nonlocal answered
                answered += 1

            async def call() -> None:
                with ambient(tenant="acme"):
                    await pipeline.run(work)

            await call()
            assert store.guard.unguarded == 0
            primary.kill()
            with anyio.fail_after(20):
                while replica.admin.info("replication")["role"] != "master" or not store.guard.closed:
                    await call()  # goes on, whoever is the primary
                    await anyio.sleep(0.02)
            replica.admin.flushall()
            await call()
            assert replica.admin.keys("resilient_llm:*rate*")
            assert store.guard.unguarded > 0
            assert store.guard.transitions == 2
            await close(store)


@contextmanager
def running_sentinel(kind: str, folder: Path, primary: Server) -> Iterator[Server]:
    """Start a Sentinel, who alone decides."""
    file = folder / "sentinel.conf"
    file.write_text(
        f"sentinel monitor llm 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds llm 400\nsentinel failover-timeout llm 1500\n"
    )
    server = Server(kind, folder)
    server._command = [
        *(server._command[0], str(file), "--sentinel", "--port", str(server.port)),
        *("--bind", "127.0.0.1", "--dir", str(folder)),
    ]
    try:
        server.start()
        yield server
    finally:
        server.close()


# Credentials

USER = "us:er@home"
SECRET = "p@ss/w:rd #1 100%"
IN_URL = f"{quote(USER, safe='')}:{quote(SECRET, safe='')}"


@pytest.mark.parametrize("scheme", ["redis+sentinel", "redis+cluster", "redis"])
async def test_credentials_in_a_url_are_unquoted(scheme: str) -> None:
    where = "one.example:26379,two.example:26380/llm" if scheme == "redis+sentinel" else "one.example:6379"
    store = store_of(f"{scheme}://{IN_URL}@{where}")
    client: Any = store.runner.client
    options = (
        client.get_connection_kwargs()
        if scheme == "redis+cluster"
        else client.connection_pool.connection_kwargs
    )
    assert (options["username"], options["password"]) == (USER, SECRET)
    if scheme == "redis+sentinel":
        manager = client.connection_pool.sentinel_manager
        asked = [each.connection_pool.connection_kwargs for each in manager.sentinels]
        assert [(each["host"], each["port"]) for each in asked] == [
            ("one.example", 26379),
            ("two.example", 26380),
        ]
        assert not any(each.get("password") for each in asked), "they are the primary's"
    await close(store)


async def test_sentinels_lead_to_a_primary_that_asks_for_them(kind: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("primary", "sentinel")]
    for folder in folders:
        folder.mkdir()
    with running(kind, folders[0]) as primary:
        with primary.admin as admin:
            admin.acl_setuser(USER, enabled=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+@all"])
        with running_sentinel(kind, folders[1], primary) as sentinel:
            with primary.admin as admin:
                admin.acl_setuser("default", enabled=False)
            url = f"redis+sentinel://{IN_URL}@127.0.0.1:{sentinel.port}/llm"
            await one_decision(store_of(url, on_store_error="closed", timeout=10.0))
            wrong = url.replace(quote(SECRET, safe=""), "wrong")
            with pytest.raises(resilient_llm.StoreUnavailableError, match=r"WRONGPASS|invalid username"):
                await one_decision(store_of(wrong, on_store_error="closed", timeout=10.0))


# Rights


def rights() -> set[str]:
    return {word[1:].partition("|")[0] for word in ACL.splitlines()[1].split() if word.startswith("+")}


OF_THE_CLIENT = {"evalsha", "eval", "subscribe", "unsubscribe", "ping", "cluster", "command"}


def test_no_right_is_missing_or_for_nothing() -> None:
    stores = Path(resilient_llm.stores.__file__).parent
    of_scripts = re.findall(
        r"redis\.p?call\('(\w+)'", "".join(path.read_text() for path in stores.glob("lua/*.lua"))
    )
    of_parts = re.findall(
        r"\.(?:send_)?command\(\s*\"(\w+)\"", "".join(path.read_text() for path in stores.glob("*.py"))
    )
    assert rights() - OF_THE_CLIENT == {name.lower() for name in of_scripts + of_parts}


def refused(server: Server) -> list[str]:
    """Say what was not allowed; the client's name, which it gives unasked from 7.2 on, does not matter."""
    return [entry["object"] for entry in server.admin.acl_log() if entry["object"] != "client|setinfo"]


async def everything(url: str) -> None:
    """Use every part of a store, in two processes' stead."""

    async def work() -> Outcome:
        await anyio.sleep(0.05)  # a call takes a while; nothing depends on how long
        return Outcome(verdict=Verdict.SUCCESS)

    async def fail() -> Outcome:
        return Outcome(verdict=Verdict.FAILURE, error_type="503", status=503)

    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(2):
            stores.append(store_of(url, on_store_error="closed", timeout=2.0))
            stack.push_async_callback(close, stores[-1])
        kinds: list[Callable[[RedisStore], Policy]] = [
            lambda store: RateLimit(
                tokens_per_minute=6_000, window=1, burst=10, estimate=lambda _call: 10, store=store
            ),
            lambda store: Bulkhead(max_concurrent=1, store=store),
            lambda store: ConcurrencyLimit(initial=2, max_queued=20, store=store),
            lambda store: CircuitBreaker(consecutive_failures=3, store=store),
            lambda store: Budget(
                usd_per_day=10,
                price=Price(input=1, output=1),
                estimate=lambda _call: 100,
                ledger=store.ledger,
            ),
        ]
        for kind in kinds:
            made = [Pipeline([kind(store)], classify_result=lambda outcome: outcome) for store in stores]  # type: ignore[arg-type, return-value]
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(one_call, made[number % 2], work)
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(one_call, made[number % 2], fail)
        await cached(stores[0])
        for store in stores:
            await store.aclose()  # what was to be told has been by then
            assert (store.guard.unguarded, store.guard.lost, store.guard.well) == (0, 0, True)


async def one_call(pipeline: Pipeline, function: Callable[[], Any]) -> None:
    with ambient(tenant="acme"), suppress(AttemptError, resilient_llm.CircuitOpenError):
        await pipeline.run(function)


async def cached(store: RedisStore) -> None:
    provider = FakeProvider(FakeModel(latency=Latency()))
    transport = ResilientTransport(provider.httpx2_transport(), policies=[Cache(store=store.replies)])
    async with httpx2.AsyncClient(transport=transport, timeout=60) as client:
        for _ in range(2):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Why?"}], "temperature": 0}
            response = await client.post("http://provider.example/v1/chat/completions", json=body)
            assert response.status_code == 200
    assert len(provider.requests) == 1


@pytest.fixture
def acl(tmp_path: Path) -> Path:
    """Give the ACL file with a password, and somebody who may ask what was refused."""
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    path = tmp_path / "users.acl"
    text = ACL.replace("#" + "0" * 64, f"#{digest}")
    path.write_text(text.replace("user default off", "user default on nopass ~* &* +@all"))
    assert digest in path.read_text()
    return path


async def test_a_server_with_these_rights_refuses_nothing(kind: str, tmp_path: Path, acl: Path) -> None:
    with running(kind, tmp_path, "--aclfile", str(acl)) as server:
        user = f"redis://resilient_llm:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{server.port}"
        await everything(f"{user}/0?protocol=3")
        assert refused(server) == []
        assert {key.partition(b":")[0] for key in server.admin.scan_iter()} <= {b"resilient_llm"}
        # What is not among them is refused, and no call is let through for it.
        with pytest.raises(resilient_llm.StoreUnavailableError):
            await one_decision(store_of(user, prefix="others:", on_store_error="closed", timeout=2.0))
        assert refused(server) != []


async def test_a_cluster_with_these_rights_refuses_nothing(tmp_path: Path, acl: Path) -> None:
    with cluster_of_three("valkey9", tmp_path, "--aclfile", str(acl)) as nodes:
        user = f"redis+cluster://resilient_llm:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{nodes[0].port}"
        await everything(user)
        assert [refused(node) for node in nodes] == [[], [], []]


# Memory


async def test_what_is_kept_takes_no_more_than_it_says(url: str) -> None:
    told = dict(re.findall(r"^\| ((?:a|one) .*?) \| (\d+) ", README, re.MULTILINE))
    figures = await measure(url, 500)
    assert told.keys() == figures.keys()
    for name, size in figures.items():
        assert 0.6 * int(told[name]) < size < 1.15 * int(told[name]), name


README = (FOLDER / "README.md").read_text()
