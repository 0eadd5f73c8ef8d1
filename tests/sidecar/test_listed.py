"""Lists of models: read and nothing else, and of whoever may ask for some only these."""

from __future__ import annotations

import json

import pytest

from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.testing import FakeProvider
from tests.sidecar.support import ASK, BEARER, KEY, OPEN, MemoryEngine, ask, logged, memory

pytestmark = pytest.mark.anyio

PROVIDER_KEY = "sk-provider-key-0123456789"
FREE = (b"authorization", b"Bearer key-of-globex-9876543210")
UNDECLARED = """
[tenants.acme]
key_env = "KEY_OF_ACME"
models = ["small", "org/tiny"]
[tenants.globex]
key_env = "KEY_OF_GLOBEX"
[targets.main]
url = "http://provider.example/v1"
api_key_env = "PROVIDER_KEY"
"""
DECLARED = f'{UNDECLARED}\n[models]\nsmall.targets = "main"\n"org/tiny".targets = "main"\n'


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("KEY_OF_GLOBEX", "key-of-globex-9876543210")
    monkeypatch.setenv("PROVIDER_KEY", PROVIDER_KEY)


@pytest.mark.parametrize("toml", [UNDECLARED, DECLARED, OPEN], ids=["undeclared", "declared", "open"])
@pytest.mark.parametrize("who", [BEARER, FREE], ids=["limited", "free"])
@pytest.mark.parametrize("method", ["DELETE", "PATCH", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/ft:large:abc", "/v1/models/m:generateContent"])
async def test_a_list_is_read_and_nothing_else(
    path: str, method: str, who: tuple[bytes, bytes], toml: str
) -> None:
    engine = MemoryEngine(FakeProvider())
    answered = await ask(Sidecar(parse(toml), engine), path=path, method=method, headers=[who])
    assert (answered.status, answered.json["error"]["code"]) == (405, "method_not_allowed")
    assert answered.headers[b"allow"] == b"GET, HEAD, OPTIONS"
    assert engine.sent == []


@pytest.mark.parametrize("toml", [UNDECLARED, DECLARED], ids=["undeclared", "declared"])
async def test_who_may_ask_for_some_models_sees_these(toml: str) -> None:
    engine = MemoryEngine(FakeProvider())
    sidecar = Sidecar(parse(toml), engine)
    listed = await ask(sidecar, b"", path="/v1/models", method="GET", headers=[BEARER])
    assert [model["id"] for model in listed.json["data"]] == ["small", "org/tiny"]
    for path, status in (
        ("small", 200),
        ("org/tiny", 200),
        ("org%2Ftiny", 200),
        ("org%2ftiny", 200),
        ("large", 404),
        ("small/large", 404),
        ("small%2Flarge", 404),
        ("org%252Ftiny", 400),
        ("org%2F..%2Ftiny", 400),
    ):
        one = await ask(sidecar, b"", path=f"/v1/models/{path}", method="GET", headers=[BEARER])
        assert one.status == status
    assert engine.sent == []


async def test_who_may_ask_for_all_gets_the_providers_list_where_none_is_declared() -> None:
    engine = MemoryEngine(FakeProvider())
    answered = await ask(
        Sidecar(parse(UNDECLARED), engine), b"", path="/v1/models", method="GET", headers=[FREE]
    )
    assert answered.status == 200
    assert [(request.method, request.url) for request in engine.sent] == [
        ("GET", "http://provider.example/v1/models")
    ]


@pytest.mark.parametrize("toml", [UNDECLARED, DECLARED], ids=["undeclared", "declared"])
@pytest.mark.parametrize(
    ("others", "status"),
    [
        (b'"models": ["org/tiny"]', 200),
        (b'"models": ["org/tiny", "large"]', 404),
        (b'"models": "large"', 404),
        (b'"models": [["large"]]', 404),
        (b'"models": ["large"], "models": ["small"]', 200),
        (b'"models": ["large"], "models": []', 200),
    ],
)
async def test_a_body_names_no_model_to_go_on_to_that_is_not_for_the_tenant(
    others: bytes, status: int, toml: str
) -> None:
    engine = MemoryEngine(FakeProvider())
    body = b'{"model": "small", ' + others + b', "messages": [{"role": "user", "content": "hi"}]}'
    answered = await ask(Sidecar(parse(toml), engine), body, headers=[BEARER])
    assert answered.status == status
    assert len(engine.sent) == (status == 200)
    assert all(b"large" not in (request.body or b"") for request in engine.sent)
    for request in engine.sent:
        assert (b"content-length", b"%d" % len(request.body or b"")) in request.headers


@pytest.mark.parametrize("key", [KEY, PROVIDER_KEY, "key-of-globex-9876543210"])
@pytest.mark.parametrize("path", ["/v1/{}/x", "/v1/{}", "/{}", "/main/{}/x", "/v1/models/{}"])
@pytest.mark.parametrize("headers", [[], [BEARER]], ids=["nobody", "a tenant"])
async def test_a_key_in_a_path_is_told_to_nobody(
    path: str, key: str, headers: list[tuple[bytes, bytes]]
) -> None:
    engine = MemoryEngine(FakeProvider())
    toml = UNDECLARED.replace("models =", "passthrough = true\nmodels =") + "passthrough = true\n"
    with logged() as log:
        sidecar = Sidecar(parse(toml), engine)
        answered = await ask(sidecar, path=path.format(key), method="GET", headers=headers)
    assert answered.status in {401, 400, 404}
    assert engine.sent == []
    assert key not in answered.body.decode() + "".join(log.lines)
    assert log.entries[0]["path"] == path.format("***")


@pytest.mark.parametrize("path", ["/main/v1/chat/completions", "/main/v1/files/a-file-with-a-long-name-0123"])
async def test_a_path_without_a_key_is_logged_as_it_is(path: str) -> None:
    provider = FakeProvider()
    with logged() as log:
        await ask(memory(provider, f"{OPEN}passthrough = true\n"), path=path, headers=[BEARER])
    assert log.entries[0]["path"] == path
    assert [request.path for request in provider.requests] == [path.removeprefix("/main")]


async def test_a_key_where_the_model_belongs_is_not_told_to_a_target_by_name_either() -> None:
    engine = MemoryEngine(FakeProvider())
    body = json.dumps({**ASK, "model": f"openai/{KEY}"}).encode()
    sidecar = Sidecar(parse(f"{OPEN}passthrough = true\n"), engine)
    answered = await ask(sidecar, body, path="/main/v1/chat/completions", headers=[BEARER])
    assert (answered.status, answered.json["error"]["code"]) == (400, "invalid_request_error")
    assert engine.sent == []


@pytest.mark.parametrize("model", ["{}", "openai/{}", "{}:free"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/main/v1/chat/completions"])
async def test_a_providers_key_where_the_model_belongs_is_told_to_nobody(path: str, model: str) -> None:
    engine = MemoryEngine(FakeProvider())
    body = json.dumps({**ASK, "model": model.format(PROVIDER_KEY)}).encode()
    sidecar = Sidecar(parse(f"{UNDECLARED}passthrough = true\n"), engine)
    with logged() as log:
        answered = await ask(sidecar, body, path=path, headers=[FREE])
    assert (answered.status, answered.json["error"]["code"]) == (400, "invalid_request_error")
    assert engine.sent == []
    assert PROVIDER_KEY not in answered.body.decode() + "".join(log.lines)


async def test_a_made_up_key_may_be_in_the_name_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of one's own ask for any key, and it is often their name."""
    monkeypatch.setenv("PROVIDER_KEY", "lm-studio")
    engine = MemoryEngine(FakeProvider())
    body = json.dumps({**ASK, "model": "lm-studio-community/tiny"}).encode()
    assert (await ask(Sidecar(parse(UNDECLARED), engine), body, headers=[FREE])).status == 200


async def test_another_tenants_key_is_no_model_either() -> None:
    engine = MemoryEngine(FakeProvider())
    body = json.dumps({**ASK, "model": KEY}).encode()
    assert (await ask(Sidecar(parse(UNDECLARED), engine), body, headers=[FREE])).status == 400
    assert engine.sent == []


@pytest.mark.parametrize("key", [KEY, PROVIDER_KEY, "key-of-globex-9876543210"])
async def test_a_request_is_not_called_by_a_key(key: str) -> None:
    engine = MemoryEngine(FakeProvider())
    with logged() as log:
        answered = await ask(
            Sidecar(parse(UNDECLARED), engine), headers=[FREE, (b"x-request-id", key.encode())]
        )
    assert answered.status == 200
    assert log.entries[0]["request_id"] == answered.headers[b"x-resilient-llm-request-id"].decode()
    assert key not in str(answered.headers) + "".join(log.lines)
