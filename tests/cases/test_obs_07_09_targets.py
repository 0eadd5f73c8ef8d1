"""OBS-07 and OBS-09, where there are several targets: each gets its own credential, nobody another's; none shows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from resilient_llm import ConfigurationError, Credential, Retry, Router, Target
from resilient_llm.presets import GEMINI
from tests.signals import Recording
from tests.telemetry.observed import BODY, FIXED, client_of

pytestmark = pytest.mark.anyio

CALLERS = {"authorization": "Bearer CANARY-T1", "x-api-key": "CANARY-T2", "cookie": "s=CANARY"}
URL = "http://any.example/v1/chat/completions"
KEYS = {"A_KEY": "sk-a-SECRET", "B_KEY": "sk-b-SECRET"}


class Upstreams:
    """Answer by host, and keep what came."""

    def __init__(self, **answers: httpx2.Response) -> None:
        self.answers = answers
        self.requests: list[httpx2.Request] = []

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = self.answers.get(request.url.host.partition(".")[0])
        return answer or httpx2.Response(200, json={"choices": [], "usage": {}})

    def seen(self, host: str) -> list[str]:
        """Give all that a host was sent, as text."""
        return [
            f"{request.url} {request.headers.raw} {request.content!r}"
            for request in self.requests
            if request.url.host.startswith(host)
        ]


def target(name: str, **options: Any) -> Target:
    return Target(name=name, url=f"http://{name}.example/v1", provider="openai", model=name, **options)


async def call(
    upstreams: Upstreams, recording: Recording, *targets: Target, url: str = URL
) -> httpx2.Response:
    router = (
        Router({"m": [targets[0]], "n": list(targets[1:])}, fallbacks={"m": ["n"]})
        if targets[1:]
        else Router(targets)
    )
    async with client_of(recording, upstreams, Retry(max_attempts=1, backoff=FIXED), router) as client:
        return await client.post(url, json={**BODY, "model": "m"}, headers=CALLERS)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


async def test_obs_09_a_fallback_gets_its_own_credential_and_nobody_elses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    upstreams, recording = Upstreams(a=httpx2.Response(503, json={"error": {"message": "down"}})), Recording()
    one, other = (
        target("a", credential=Credential(env="A_KEY")),
        target("b", credential=Credential(env="B_KEY")),
    )
    response = await call(upstreams, recording, one, other)
    assert response.status_code == 200
    (first,), (second,) = upstreams.seen("a"), upstreams.seen("b")
    assert KEYS["A_KEY"] in first
    assert KEYS["B_KEY"] not in first
    assert KEYS["B_KEY"] in second
    assert KEYS["A_KEY"] not in second
    assert '"model":"b"' in second
    told = [repr(span.__dict__) for span in recording.spans] + [repr(point) for point in recording.points]
    told += [record.getMessage() for record in caplog.records]
    for text in [first, second, *told]:
        assert "CANARY" not in text
    for text in told:
        assert "SECRET" not in text


async def test_obs_09_a_fallback_without_a_credential_gets_none() -> None:
    upstreams = Upstreams(a=httpx2.Response(503))
    await call(upstreams, Recording(), target("a", credential=Credential(env="A_KEY")), target("b"))
    (second,) = upstreams.seen("b")
    assert "SECRET" not in second
    assert "CANARY" not in second
    assert "authorization" not in second.lower()


def vault() -> str:
    raise OSError("closed")


@pytest.mark.parametrize("value", [vault, lambda: ""])
async def test_obs_09_a_credential_that_is_missing_makes_a_target_unusable(value: Callable[[], str]) -> None:
    upstreams = Upstreams(a=httpx2.Response(503))
    without = target("b", credential=Credential(value=value, name="vault"))
    response = await call(upstreams, Recording(), target("a", credential=Credential(env="A_KEY")), without)
    assert response.status_code == 503
    assert upstreams.seen("a")
    assert not upstreams.seen("b")


async def test_obs_09_a_variable_that_is_not_set_is_told_when_the_client_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("B_KEY")
    with pytest.raises(
        ConfigurationError, match="target 'b': credential 'B_KEY': the environment variable B_KEY is"
    ):
        client_of(
            Recording(), Upstreams(), Retry(), Router([target("b", credential=Credential(env="B_KEY"))])
        )


async def test_obs_09_a_redirect_to_another_host_is_not_followed() -> None:
    upstreams = Upstreams(
        a=httpx2.Response(307, headers={"location": "http://b.example/v1/chat/completions"})
    )
    response = await call(upstreams, Recording(), target("a", credential=Credential(env="A_KEY")))
    assert response.status_code == 307
    assert len(upstreams.requests) == 1


async def test_obs_07_a_key_in_the_callers_url_does_not_go_on_and_the_targets_is_no_part_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    not_found = httpx2.Response(404, json={"error": {"code": 404, "message": "no", "status": "NOT_FOUND"}})
    upstreams, recording = Upstreams(generativelanguage=not_found), Recording()
    asked = "http://any.example/v1beta/models/gemini-2.5-pro:generateContent?key=AIza-CANARY&alt=json"
    own = GEMINI.target(model="gemini-2.5-flash", credential=Credential(env="A_KEY"))
    response = await call(upstreams, recording, own, url=asked)
    assert response.status_code == 404
    (request,) = upstreams.requests
    assert str(request.url) == (
        "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-flash:generateContent?alt=json"
    )
    assert request.headers["x-goog-api-key"] == KEYS["A_KEY"]
    assert "CANARY" not in str(request.headers.raw)
    told = [repr(span.__dict__) for span in recording.spans] + [repr(point) for point in recording.points]
    told += [record.getMessage() for record in caplog.records if record.name.startswith("resilient")]
    for text in told:
        assert "CANARY" not in text
        assert "SECRET" not in text


async def test_http_10_repeated_headers_go_on_in_their_order() -> None:
    upstreams = Upstreams()
    async with client_of(Recording(), upstreams, Router([target("a")])) as client:
        headers = [("anthropic-beta", "one"), ("x-other", "1"), ("anthropic-beta", "two")]
        await client.post(URL, json=BODY, headers=headers)
    names = {b"anthropic-beta", b"x-other"}
    sent = [one for one in upstreams.requests[0].headers.raw if one[0].lower() in names]
    assert sent == [(b"anthropic-beta", b"one"), (b"x-other", b"1"), (b"anthropic-beta", b"two")]
