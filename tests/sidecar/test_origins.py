"""What pages of other origins may read: what the sidecar's own configuration says, whatever a provider says."""

from __future__ import annotations

import json

import pytest

from resilient_llm.testing import FakeProvider, Fault
from tests.sidecar.support import ASK, BEARER, KEY, MemoryEngine, ask, memory

pytestmark = pytest.mark.anyio

MINE = (b"origin", b"https://app.example")
THEIRS = {
    "access-control-allow-origin": "*",
    "access-control-allow-credentials": "true",
    "access-control-expose-headers": "*",
    "timing-allow-origin": "*",
    "alt-svc": 'h3=":443"',
    "set-cookie": "a=b",
    "strict-transport-security": "max-age=31536000; includeSubDomains",
}
TENANTS = """
server.cors_origins = [%s]
targets.main.url = "http://provider.example/v1"
tenants.acme.key_env = "KEY_OF_ACME"
"""


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)


@pytest.mark.parametrize(("status", "stream"), [(None, False), (None, True), (400, False), (500, True)])
@pytest.mark.parametrize(
    ("allowed", "origin", "may"),
    [
        ("", MINE, False),
        ('"https://app.example"', MINE, True),
        ('"https://app.example"', (b"origin", b"https://evil.example"), False),
        ('"https://app.example"', (b"origin", b"null"), False),
    ],
)
async def test_a_provider_lets_no_page_read(
    allowed: str, origin: tuple[bytes, bytes], may: bool, status: int | None, stream: bool
) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=status, headers=THEIRS)] * 5)
    body = json.dumps({**ASK, "stream": stream}).encode()
    answered = await ask(memory(provider, TENANTS % allowed), body, headers=[BEARER, origin])
    assert answered.status == (status or 200)
    names = [name for name, _ in answered.messages[0]["headers"]]
    assert [name for name in names if name.decode() in THEIRS] == may * [b"access-control-allow-origin"]
    assert answered.headers.get(b"access-control-allow-origin") == (origin[1] if may else None)


REBOUND = (b"host", b"evil.example:8080")
IMAGE = (b"sec-fetch-site", b"cross-site")
TARGET = 'targets.main = {url = "http://provider.example/v1", passthrough = true}\n'
MORE = {
    "closed": "",
    "with origins": 'server.cors_origins = ["https://app.example"]',
    "open": "server.open = true",
    "with tenants": 'tenants.acme.key_env = "KEY_OF_ACME"',
}


@pytest.mark.parametrize("path", ["/v1/models", "/main/v1/files", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("how", "headers", "code"),
    [
        ("closed", (REBOUND,), "host_not_allowed"),
        ("closed", (REBOUND, (b"sec-fetch-site", b"same-origin")), "host_not_allowed"),
        ("closed", ((b"host", b"localhost.evil.example"),), "host_not_allowed"),
        ("closed", ((b"host", b"127.0.0.1.evil.example"),), "host_not_allowed"),
        ("closed", ((b"host", b"192.0.2.1"),), "host_not_allowed"),
        ("closed", (IMAGE,), "origin_not_allowed"),
        ("closed", ((b"sec-fetch-site", b"same-site"),), "origin_not_allowed"),
        ("closed", (), None),
        ("closed", ((b"host", b""),), None),
        ("closed", ((b"host", b"LocalHost:8080"),), None),
        ("closed", ((b"host", b"127.0.0.1:8080"),), None),
        ("closed", ((b"host", b"127.0.0.2"),), None),
        ("closed", ((b"host", b"[::1]:8080"),), None),
        ("closed", ((b"host", b"[::1]"), (b"sec-fetch-site", b"none")), None),
        ("with origins", (MINE, IMAGE), None),
        ("with origins", (MINE, REBOUND), "host_not_allowed"),
        ("with origins", (IMAGE,), "origin_not_allowed"),
        ("open", (REBOUND, IMAGE), None),
        ("with tenants", (REBOUND, IMAGE, BEARER), None),
    ],
)
async def test_without_tenants_no_page_from_elsewhere_asks_unseen(
    how: str, headers: tuple[tuple[bytes, bytes], ...], code: str | None, path: str
) -> None:
    sidecar = memory(FakeProvider(), TARGET + MORE[how])
    method = "POST" if path.endswith("completions") else "GET"
    answered = await ask(sidecar, ASK if method == "POST" else b"", path=path, method=method, headers=headers)
    engine = sidecar._engine
    assert isinstance(engine, MemoryEngine)
    if code is None:
        assert answered.status != 403
        assert len(engine.sent) == 1
    else:
        assert answered.status == 403
        assert json.loads(answered.body)["error"]["code"] == code
        assert not engine.sent
