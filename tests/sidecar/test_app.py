"""The sidecar in memory: what is carried to providers and back, and what is refused, on both event loops."""

from __future__ import annotations

import gzip
import json
import math
import zlib

import anyio
import pytest

from resilient_llm.message import Headers
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.observability import observe
from resilient_llm.testing import FakeProvider, Fault
from tests.asgi.server import Connection
from tests.sidecar.support import ANSWER, ASK, BEARER, KEY, OPEN, MemoryEngine, ask, logged, memory

pytestmark = pytest.mark.anyio

TENANTS = """
[tenants.acme]
key_sha256 = "2aa8e7bb71bd06a3cfdbfc1e0f5a5f1e3b7ec4ed5f2b5cf0a7fd2a5be2b4b9c1"
key_env = "KEY_OF_ACME"
models = ["gpt-4o"]

[tenants.globex]
key_env = "KEY_OF_GLOBEX"

[targets.main]
url = "http://provider.example/v1"
api_key_env = "PROVIDER_KEY"
passthrough = true

[models]
"gpt-4o".targets = "main"
secret.targets = "main/secret-1"
"""

PRICED = f"{OPEN}price = {{ input = 1.0, output = 2.0 }}"


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("KEY_OF_GLOBEX", "key-of-globex-9876543210")
    monkeypatch.setenv("PROVIDER_KEY", "sk-provider-key")


GLOBEX = (b"authorization", b"Bearer key-of-globex-9876543210")


async def test_a_chat_completion_is_proxied() -> None:
    provider = FakeProvider()
    with logged() as log:
        answered = await ask(memory(provider))
    assert answered.status == 200
    assert answered.json["choices"][0]["message"]["content"] == ANSWER
    assert provider.requests[0].raw_body == json.dumps(ASK).encode()
    (entry,) = log.entries
    assert {name: entry[name] for name in ("model", "target", "status", "outcome", "attempts")} == {
        "model": "gpt-4o",
        "target": "main",
        "status": 200,
        "outcome": "ok",
        "attempts": 1,
    }
    assert entry["output_tokens"] == 9
    assert answered.headers[b"x-resilient-llm-request-id"].decode() == entry["request_id"]


async def test_a_stream_is_passed_on_as_it_comes() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(token_delay=1.0)])
    answered = await ask(memory(provider), {**ASK, "stream": True})
    times = [at for at, message in answered.sent if message.get("body")]
    assert times[-1] - times[0] >= 7
    assert answered.body.endswith(b"data: [DONE]\n\n")
    assert b"content-length" not in answered.headers


async def test_other_models_and_keys_are_refused_before_anything_is_sent() -> None:
    provider = FakeProvider()
    engine = MemoryEngine(provider)
    sidecar = Sidecar(parse(TENANTS), engine)
    for headers, model, status, code in (
        ([], "gpt-4o", 401, "invalid_api_key"),
        ([(b"authorization", b"Bearer nobodys-key-0123456789")], "gpt-4o", 401, "invalid_api_key"),
        ([(b"authorization", b"Basic abc")], "gpt-4o", 401, "invalid_api_key"),
        ([BEARER, (b"x-api-key", b"another-key")], "gpt-4o", 401, "invalid_api_key"),
        ([BEARER], "secret", 404, "model_not_found"),
        ([GLOBEX], "unheard-of", 404, None),
    ):
        answered = await ask(sidecar, {**ASK, "model": model}, headers=headers)
        assert answered.status == status
        if code is not None:
            assert answered.json["error"]["code"] == code
    assert engine.sent == []
    assert (await ask(sidecar, headers=[BEARER])).status == 200
    assert (await ask(sidecar, headers=[(b"x-api-key", KEY.encode())])).status == 200
    assert (await ask(sidecar, headers=[(b"api-key", KEY.encode())])).status == 200
    assert (await ask(sidecar, headers=[(b"x-goog-api-key", KEY.encode())])).status == 200


async def test_an_unknown_key_is_refused_before_the_body_is_read() -> None:
    sidecar = memory(FakeProvider(), TENANTS)
    connection = Connection(b"{", method="POST", path="/v1/chat/completions", headers=(), unfinished=True)
    await connection.run(sidecar)
    assert connection.status == 401
    assert connection.asked == []
    assert connection.headers[b"www-authenticate"] == b"Bearer"


async def test_keys_of_clients_and_providers_stay_on_their_sides() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=500), Fault(status=401), Fault(status=400)])
    with logged() as log:
        sidecar = memory(provider, TENANTS)
        answers = [await ask(sidecar, headers=[BEARER, (b"cookie", b"session=s")]) for _ in range(3)]
    for request in provider.requests:
        assert request.headers["authorization"] == "Bearer sk-provider-key"
        assert KEY not in str(request.headers)
        assert "cookie" not in request.headers
    for answered in answers:
        assert b"sk-provider-key" not in answered.body + str(answered.messages).encode()
    assert "sk-provider-key" not in "".join(log.lines)
    assert KEY not in "".join(log.lines)


@pytest.mark.parametrize("model", [KEY, f"openai/{KEY}", f"{KEY}-mini"])
@pytest.mark.parametrize("toml", [TENANTS, OPEN])
async def test_a_key_where_the_model_belongs_is_told_to_nobody(model: str, toml: str) -> None:
    provider = FakeProvider()
    with logged() as log:
        answered = await ask(memory(provider, toml), {**ASK, "model": model}, headers=[BEARER])
    assert answered.status == 400
    assert "API key" in answered.json["error"]["message"]
    assert KEY not in answered.body.decode() + "".join(log.lines)
    assert not provider.requests


async def test_a_long_name_of_a_model_is_no_key() -> None:
    provider = FakeProvider()
    model = "organisation/a-model-with-a-long-name-2026-11-30"
    answered = await ask(memory(provider, OPEN), {**ASK, "model": model}, headers=[BEARER])
    assert answered.status == 200
    assert json.loads(provider.requests[0].raw_body)["model"] == model


@pytest.mark.parametrize(("length", "status"), [(256, 200), (257, 400), (1_000_000, 400)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/main/v1/chat/completions"])
async def test_what_a_model_is_called_has_an_end(path: str, length: int, status: int) -> None:
    provider = FakeProvider()
    with logged() as log:
        sidecar = memory(provider, f"{OPEN}passthrough = true\n")
        answered = await ask(sidecar, {**ASK, "model": length * "m"}, path=path)
    assert answered.status == status
    assert len(provider.requests) == (status == 200)
    if status == 400:
        assert "longer than 256 characters" in answered.json["error"]["message"]
    assert len(log.lines[0]) < 2_000


@pytest.mark.parametrize("tenant", ["", '[tenants.globex]\nkey_env = "KEY_OF_GLOBEX"\npassthrough = true\n'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/main/v1/chat/completions"])
async def test_what_a_model_is_called_can_be_written_down(path: str, tenant: str) -> None:
    provider = FakeProvider()
    config = parse(f"{OPEN}passthrough = true\n{tenant}")
    seen = observe(config)
    sidecar = Sidecar(config, MemoryEngine(provider), telemetry=seen.telemetry)
    answered = await ask(sidecar, {**ASK, "model": "half \ud800"}, path=path, headers=[GLOBEX])
    assert (answered.status, answered.json["error"]["code"]) == (400, "invalid_request_error")
    assert not provider.requests
    answered = await ask(sidecar, {**ASK, "model": "whole \U0001f600"}, path=path, headers=[GLOBEX])
    assert answered.status == 200
    assert seen.metrics is not None
    assert "whole \U0001f600" in (await seen.metrics())[0].decode()
    seen.shutdown()


async def test_what_a_call_costs_is_unknown_where_no_price_is() -> None:
    with logged() as log:
        await ask(memory(FakeProvider()))
        await ask(memory(FakeProvider(), PRICED))
    unknown, known = log.entries
    assert unknown["cost_usd"] is None
    assert known["cost_usd"] > 0


async def test_a_provider_that_repeats_a_key_gives_it_to_nobody() -> None:
    provider = FakeProvider()
    told = {"error": {"message": "sk-provider-key is no good", "type": "invalid_request_error"}}
    provider.script(
        None, [Fault(status=400, body=told), Fault(status=403, body=told), Fault(status=401, body=told)]
    )
    with logged() as log:
        # A new one each time, or the key would be set aside.
        answers = [await ask(memory(provider, TENANTS), headers=[BEARER]) for _ in range(3)]
    assert [answered.status for answered in answers] == [400, 403, 502]
    assert answers[0].json["error"]["message"] == "*** is no good"
    assert answers[2].json["error"]["code"] == "provider_credentials"
    assert all(b"sk-provider" not in answered.body for answered in answers)
    assert "sk-provider" not in "".join(log.lines)


async def test_a_tenant_cannot_ask_for_a_model_by_naming_two() -> None:
    provider = FakeProvider()
    sidecar = memory(provider, TENANTS)
    body = b'{"model": "secret", "messages": [], "m\\u006fdel": "gpt-4o"}'
    assert (await ask(sidecar, body, headers=[BEARER])).status == 200
    assert b"secret" not in provider.requests[0].raw_body
    assert (await ask(sidecar, body.replace(b"gpt-4o", b"secret"), headers=[BEARER])).status == 404


async def test_models_are_listed_as_each_sdk_reads_them() -> None:
    sidecar = memory(FakeProvider(), TENANTS)
    listed = await ask(sidecar, b"", path="/v1/models", method="GET", headers=[BEARER])
    assert [model["id"] for model in listed.json["data"]] == ["gpt-4o"]
    listed = await ask(sidecar, b"", path="/v1/models", method="GET", headers=[GLOBEX])
    assert [model["id"] for model in listed.json["data"]] == ["gpt-4o", "secret"]
    anthropic = [GLOBEX, (b"anthropic-version", b"2023-06-01")]
    listed = await ask(sidecar, b"", path="/v1/models", method="GET", headers=anthropic)
    assert listed.json["last_id"] == "secret"
    one = await ask(sidecar, b"", path="/v1/models/secret", method="GET", headers=[GLOBEX])
    assert one.json["id"] == "secret"
    assert (await ask(sidecar, b"", path="/v1/models/secret", method="GET", headers=[BEARER])).status == 404
    head = await ask(sidecar, b"", path="/v1/models", method="HEAD", headers=[BEARER])
    assert (head.status, head.body) == (200, b"")


async def test_a_target_is_asked_by_name_where_that_is_allowed() -> None:
    provider = FakeProvider()
    sidecar = memory(provider, TENANTS)
    answered = await ask(sidecar, b"", path="/main/v1/models", method="GET", headers=[GLOBEX])
    assert answered.status == 200
    assert provider.requests[-1].path == "/v1/models"
    assert provider.requests[-1].headers["authorization"] == "Bearer sk-provider-key"
    # Who may ask for some models only could ask for any of them there.
    assert (await ask(sidecar, b"", path="/main/v1/models", method="GET", headers=[BEARER])).status == 404
    assert (await ask(sidecar, b"", path="/other/v1/models", method="GET", headers=[GLOBEX])).status == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/main/../admin", 400),
        ("/main/%2e%2e/x", 400),
        ("/main/%252e%252e/x", 400),
        ("/main/a%2f..%2fb", 400),
        ("/main//x", 400),
        ("/main/a%5cb", 400),
        ("/main/a%00b", 400),
        ("/main/a\\b", 400),
        ("/v1/chat/completions/", 404),
        ("/V1/chat/completions", 404),
        ("/nothing", 404),
        ("/", 404),
    ],
)
async def test_paths_that_could_be_taken_for_others_are_refused(path: str, status: int) -> None:
    engine = MemoryEngine(FakeProvider())
    assert (await ask(Sidecar(parse(TENANTS), engine), path=path, headers=[GLOBEX])).status == status
    assert engine.sent == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"model"',
        b'{"messages": []}',
        b'{"model": 7}',
        b'{"model": ""}',
        b'{"model": "\xff"}',
        b'{"model": "gpt-4o", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "gpt-4o", "n": ' + b"9" * 5_000 + b"}",
        b'\xef\xbb\xbf{"model": "gpt-4o"}',
        '{"model": "gpt-4o"}'.encode("utf-16-le"),
        '{"model": "gpt-4o"}'.encode("utf-32-le"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    provider = FakeProvider()
    with logged() as log:
        answered = await ask(memory(provider), body)
    assert answered.status == 400
    assert answered.json["error"]["code"] == "invalid_request_error"
    assert provider.requests == []
    assert log.entries[0]["outcome"] == "refused"


async def test_errors_are_told_as_the_api_that_was_called_tells_them() -> None:
    answered = await ask(memory(FakeProvider()), b"{", path="/v1/messages")
    assert answered.json["type"] == "error"
    assert answered.headers[b"x-should-retry"] == b"false"


async def test_a_body_larger_than_allowed_is_refused() -> None:
    sidecar = memory(
        FakeProvider(), "[server]\nmax_body = 100\n[targets.main]\nurl = 'http://provider.example/v1'"
    )
    large = json.dumps({**ASK, "pad": "x" * 100}).encode()
    declared: Headers = [(b"content-length", str(len(large)).encode())]
    connection = Connection(large, method="POST", path="/v1/chat/completions", headers=declared)
    await connection.run(sidecar)
    assert (connection.status, connection.asked) == (413, [])
    assert (await ask(sidecar, large)).status == 413


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        (b"gzip", gzip.compress(json.dumps(ASK).encode()), 200),
        (b"deflate", zlib.compress(json.dumps(ASK).encode()), 200),
        (b"identity", json.dumps(ASK).encode(), 200),
        (b"gzip", gzip.compress(b" " * 2_000_000), 413),
        (b"gzip", json.dumps(ASK).encode(), 400),
        (b"compress", b"x", 415),
        (b"gzip, gzip, gzip, gzip", b"x", 415),
    ],
)
async def test_http_12_bodies_are_bounded_as_sent_and_decoded(
    encoding: bytes, body: bytes, status: int
) -> None:
    provider = FakeProvider()
    sidecar = memory(
        provider, "[server]\nmax_body = 1_000_000\n[targets.main]\nurl = 'http://provider.example/v1'"
    )
    answered = await ask(sidecar, body, headers=[(b"content-encoding", encoding)])
    assert answered.status == status
    if status == 200:
        (request,) = provider.requests
        assert request.body == ASK
        assert "content-encoding" not in request.headers
        assert request.headers["content-length"] == str(len(request.raw_body))


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"gzip", gzip.compress(json.dumps(ASK).encode())[:-20]),
        (b"gzip", gzip.compress(json.dumps(ASK).encode())[:-5]),  # all of the JSON is there
        (b"gzip", gzip.compress(json.dumps(ASK).encode()) + b"more"),
        (b"gzip, gzip", gzip.compress(gzip.compress(json.dumps(ASK).encode())[:-5])),
        (b"deflate", zlib.compress(json.dumps(ASK).encode())[:-2]),
        (b"deflate", zlib.compress(json.dumps(ASK).encode()) + b"more"),
    ],
)
async def test_http_12_a_body_that_is_cut_off_or_goes_on_is_refused(encoding: bytes, body: bytes) -> None:
    provider = FakeProvider()
    answered = await ask(memory(provider), body, headers=[(b"content-encoding", encoding)])
    assert answered.status == 400
    assert b'"code": "invalid_encoding"' in answered.body
    assert not provider.requests


async def test_no_body_at_all_is_not_one_that_is_cut_off() -> None:
    answered = await ask(memory(FakeProvider()), b"", headers=[(b"content-encoding", b"gzip")])
    assert answered.status == 400
    assert b'"code": "invalid_request_error"' in answered.body


async def test_http_03_headers_of_the_connection_stay_on_it() -> None:
    provider = FakeProvider()
    provider.script(
        None,
        [
            Fault(
                status=400,
                headers={
                    "connection": "x-inner, close",
                    "x-inner": "1",
                    "keep-alive": "timeout=5",
                    "x-outer": "2",
                },
            )
        ],
    )
    answered = await ask(
        memory(provider),
        headers=[
            (b"connection", b"close, X-Internal-Token"),
            (b"x-internal-token", b"t"),
            (b"keep-alive", b"timeout=5"),
            (b"te", b"trailers"),
            (b"proxy-authorization", b"x"),
            (b"upgrade", b"h2c"),
            (b"x-mine", b"kept"),
        ],
    )
    headers = provider.requests[0].headers
    assert headers["x-mine"] == "kept"
    for name in ("x-internal-token", "keep-alive", "te", "proxy-authorization", "upgrade", "connection"):
        assert name not in headers
    assert answered.headers[b"x-outer"] == b"2"
    for dropped in (b"x-inner", b"keep-alive", b"connection", b"transfer-encoding"):
        assert dropped not in answered.headers


async def test_a_client_that_leaves_cancels_the_request_to_the_provider() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(delay_headers=math.inf), Fault(stall_after_tokens=2)])
    sidecar = memory(provider)
    for body in (ASK, {**ASK, "stream": True}):
        connection = Connection(
            json.dumps(body).encode(), method="POST", path="/v1/chat/completions", headers=()
        )
        connection.scope["query_string"] = b""
        with logged() as log, anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connection.run, sidecar)
                await anyio.sleep(5)
                connection.disconnect()
        assert connection.ended is not None
        assert connection.ended <= 6
        entry = log.entries[0]
        assert entry["outcome"] == "cancelled"
        # What had come of the stream was used, and nobody has reported how much that is.
        assert (entry.get("output_tokens"), entry.get("usage_estimated")) == (
            (3, True) if "stream" in body else (None, None)
        )
        await anyio.sleep(1)
    assert provider.requests[-1].disconnected_at is not None
    assert sidecar.setup.running == 0


async def test_a_client_that_leaves_while_it_sends_is_forgotten() -> None:
    sidecar = memory(FakeProvider())
    connection = Connection(b"{", method="POST", path="/v1/chat/completions", headers=(), unfinished=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.disconnect_at, 3)
        await connection.run(sidecar)
    assert connection.messages == []
    assert connection.error is None


async def test_a_body_that_does_not_come_is_refused() -> None:
    sidecar = memory(FakeProvider())
    connection = Connection(b"{", method="POST", path="/v1/chat/completions", headers=(), unfinished=True)
    await connection.run(sidecar)
    assert (connection.status, connection.ended) == (408, 30)
    assert connection.headers[b"connection"] == b"close"


async def test_a_client_can_shorten_its_deadline() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(delay_headers=60))
    answered = await ask(memory(provider), headers=[(b"x-request-timeout", b"5")])
    assert (answered.status, answered.ended) == (504, 5)
    assert (await ask(memory(provider), headers=[(b"x-request-timeout", b"soon")])).status == 400


async def test_options_and_other_methods() -> None:
    sidecar = memory(FakeProvider())
    answered = await ask(sidecar, b"", method="OPTIONS")
    assert (answered.status, answered.body) == (204, b"")
    assert b"content-length" not in answered.headers
    assert (await ask(sidecar, b"", method="GET")).status == 405
    assert (await ask(sidecar, b"", method="TRACE")).status == 405


async def test_pages_may_ask_only_from_origins_that_are_allowed() -> None:
    origin = (b"origin", b"https://app.example")
    preflight = (b"access-control-request-method", b"POST")
    sidecar = memory(FakeProvider())
    assert (await ask(sidecar, headers=[origin])).status == 403
    assert (await ask(sidecar, b"", method="OPTIONS", headers=[origin, preflight])).status == 403
    sidecar = memory(
        FakeProvider(),
        "server.cors_origins = ['https://app.example']\ntargets.main.url = 'http://provider.example/v1'",
    )
    answered = await ask(sidecar, headers=[origin])
    assert answered.status == 200
    assert answered.headers[b"access-control-allow-origin"] == b"https://app.example"
    answered = await ask(sidecar, b"", method="OPTIONS", headers=[origin, preflight])
    assert answered.status == 204
    assert (await ask(sidecar, headers=[(b"origin", b"https://evil.example")])).status == 403


async def test_ids_of_requests_cannot_be_used_to_write_logs() -> None:
    with logged() as log:
        sidecar = memory(FakeProvider())
        await ask(sidecar, headers=[(b"x-request-id", b"mine-1")])
        await ask(sidecar, headers=[(b"x-request-id", b'a"b')])
        await ask(sidecar, {**ASK, "model": 'x"}\n{"forged": true\r\n'}, headers=[])
    assert log.entries[0]["request_id"] == "mine-1"
    assert log.entries[1]["request_id"] != 'a"b'
    assert all("\n" not in line for line in log.lines)
    assert log.entries[2]["model"].startswith('x"}\n')


async def test_a_tenants_quota_and_bulkhead_are_its_own() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(delay_headers=1))
    sidecar = memory(
        provider,
        """
        [tenants.acme]
        key_env = "KEY_OF_ACME"
        quota = {requests_per_minute = 2, max_wait = 0}
        [tenants.globex]
        key_env = "KEY_OF_GLOBEX"
        bulkhead = {max_concurrent = 1, max_queued = 0}
        [targets.main]
        url = "http://provider.example/v1"
        """,
    )
    first = await ask(sidecar, headers=[BEARER])
    assert first.headers[b"ratelimit-policy"] == b'"requests-tenant";q=2;w=60'
    statuses = [(await ask(sidecar, headers=[BEARER])).status for _ in range(2)]
    assert statuses == [200, 429]
    results: list[int | None] = []

    async def one() -> None:
        results.append((await ask(sidecar, headers=[GLOBEX])).status)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)
    assert sorted(map(int, filter(None, results))) == [200, 429, 429]


async def test_a_tenants_budget_is_its_own() -> None:
    sidecar = memory(
        FakeProvider(),
        """
        [tenants.acme]
        key_env = "KEY_OF_ACME"
        budget = {tokens_per_day = 600}
        [tenants.globex]
        key_env = "KEY_OF_GLOBEX"
        [targets.main]
        url = "http://provider.example/v1"
        """,
    )
    asked = {**ASK, "max_tokens": 500}
    assert (await ask(sidecar, asked, headers=[BEARER])).status == 200
    statuses = [(await ask(sidecar, asked, headers=[BEARER])).status for _ in range(20)]
    assert 429 in statuses
    assert (await ask(sidecar, asked, headers=[GLOBEX])).status == 200


async def test_a_defect_is_a_500_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = memory(FakeProvider())

    def broken(*_given: object) -> None:
        raise RuntimeError("sk-secret in a message")

    monkeypatch.setattr(sidecar.setup.door, "carry", broken)
    with logged() as log:
        answered = await ask(sidecar)
    assert answered.status == 500
    assert b"secret" not in answered.body
    assert "sk-secret" not in "".join(log.lines)
    assert any(json.loads(line).get("exception") == "RuntimeError" for line in log.lines)


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("more", ["", "[routing]\nname_target = false\n"])
async def test_the_log_says_which_target_was_asked_whatever_a_provider_says_of_itself(
    status: int, more: str
) -> None:
    provider = FakeProvider()
    named = {"x-resilient-llm-target": "another", "content-type": "application/json"}
    body = '{"choices": [{"message": {"content": "a"}}]}' if status == 200 else '{"error": {"message": "no"}}'
    provider.script(None, lambda _request: Fault(status=status, headers=named, body=body))
    with logged() as log:
        client = await ask(memory(provider, OPEN + more))
    assert client.status == status
    assert log.entries[0]["target"] == "main"
