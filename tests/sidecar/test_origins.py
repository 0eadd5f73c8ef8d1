"""What pages of other origins may read: what the sidecar's own configuration says, whatever a provider says."""

from __future__ import annotations

import json

import pytest

from resilient_llm.testing import FakeProvider, Fault
from tests.sidecar.support import ASK, BEARER, KEY, ask, memory

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
