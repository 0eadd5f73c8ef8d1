"""What is asked of a target by its name goes there as it is, but for keys."""

from __future__ import annotations

import pytest

from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.testing import FakeProvider
from tests.asgi.server import Connection
from tests.sidecar.support import BEARER, KEY, MemoryEngine, logged

pytestmark = pytest.mark.anyio

OTHERS = "key-of-globex-9876543210"
TOML = """
[tenants.acme]
key_env = "KEY_OF_ACME"
passthrough = true
[tenants.globex]
key_env = "KEY_OF_GLOBEX"
[targets.main]
url = "http://provider.example/v1"
passthrough = true
[targets.root]
url = "http://provider.example"
dialect = "openai"
passthrough = true
"""


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("KEY_OF_GLOBEX", OTHERS)


async def sent(path: str, query: str = "", *, toml: str = TOML, method: str = "POST") -> str | int | None:
    """Give the URL that is asked behind a sidecar, after the provider's origin, or else the status."""
    engine = MemoryEngine(FakeProvider())
    body = b'{"model": "gpt-4o", "messages": []}'
    connection = Connection(body, method=method, path=path, headers=[BEARER])
    connection.scope["raw_path"] = path.encode()
    connection.scope["query_string"] = query.encode()
    with logged():
        answered = await connection.run(Sidecar(parse(toml), engine))
    if not engine.sent:
        return answered.status
    return engine.sent[0].url.removeprefix("http://provider.example")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/main/v1/fim/completions", "/v1/fim/completions"),
        ("/main/fim/completions", "/v1/fim/completions"),
        ("/main/v1/chat/moderations", "/v1/chat/moderations"),
        ("/main/chat/completions", "/v1/chat/completions"),
        ("/main/foo/", "/v1/foo/"),
        ("/main", "/v1"),
        ("/root", ""),
        ("/root/beta/chat/completions", "/beta/chat/completions"),
        ("/root/my/embeddings", "/my/embeddings"),
        ("/root/x/v1/chat/completions", "/x/v1/chat/completions"),
    ],
)
async def test_a_path_is_joined_to_the_targets_url(path: str, expected: str) -> None:
    assert await sent(path) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("token=next&page=2", "?token=next&page=2"),
        (
            "a=1&&sig=2&key=3&auth=4&signature=5&api-version=6",
            "?a=1&&sig=2&key=3&auth=4&signature=5&api-version=6",
        ),
        (f"a=1&token={KEY}&b=2", "?a=1&b=2"),
        (f"key={OTHERS}", ""),
        (f"a=Bearer+{KEY}", ""),
        (f"a=Bearer%20{KEY.replace('k', '%6b')}", ""),
        (KEY, ""),
        (f"{KEY}=1&b=2", "?b=2"),
        (f"b=2&{OTHERS}=", "?b=2"),
        (f"a=of-{KEY}-now", ""),
        ("api_key=sk-of-somebody", ""),
    ],
)
async def test_a_query_goes_on_without_keys(query: str, expected: str) -> None:
    assert await sent("/root/files", query) == f"/files{expected}"


@pytest.mark.parametrize("query", [f"beta=true&next={KEY}", f"beta=true&next={OTHERS}"])
async def test_no_key_in_a_query_reaches_whoever_answers_for_a_model(query: str) -> None:
    assert await sent("/v1/chat/completions", query) in {
        "/v1/chat/completions?beta=true",
        "/chat/completions?beta=true",
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/models/meta-llama%2FLlama-3", "/v1/models/meta-llama%2FLlama-3"),
        ("/main/v1/models/meta-llama%2fLlama-3", "/v1/models/meta-llama%2fLlama-3"),
        ("/main/model/arn%3Aaws%2Fclaude/converse", "/v1/model/arn%3Aaws%2Fclaude/converse"),
        ("/main/v1/files/a%2Fb", 400),
        ("/main/a%2Fmodels/b", 400),
        ("/main%2Fv1/models/b", 400),
        ("/main/v1/models/..%2Fx", 400),
        ("/main/v1/models/a%2F..%2Fb", 400),
        ("/main/v1/models/a%2F%2E%2e", 400),
        ("/main/v1/models/a%2F..;a%2Fb", 400),
        ("/main/v1/models/a%2F%2Fb", 400),
        ("/main/v1/models/%2Fb", 400),
        ("/main/v1/models/a%252Fb", 400),
        ("/main/v1/models/a%2F%252e%252e", 400),
        ("/main/v1/models/a%2F%c0%ae", 400),
        ("/main/v1/models/a%2F%5c", 400),
        ("/v1/models/..%2F..%2Fx", 400),
        (f"/v1/models/org%2F{OTHERS}", 400),
        (f"/main/v1/models/org%2f{OTHERS}", 400),
    ],
)
async def test_the_slash_in_a_models_name_is_one_however_it_is_written(
    path: str, expected: str | int
) -> None:
    only = TOML.partition("[targets.root]")[0]
    assert await sent(path, toml=only, method="GET") == expected
