"""Targets and credentials: what may be said of them, what they are called, and that no secret shows."""

from __future__ import annotations

import dataclasses
import json
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from resilient_llm import (
    AttemptTimeout,
    Bulkhead,
    Call,
    CircuitBreaker,
    ConcurrencyLimit,
    ConfigurationError,
    Credential,
    Deadline,
    Limit,
    NoTargetError,
    Policy,
    Price,
    Profile,
    RateLimit,
    Request,
    Retry,
    Router,
    Target,
    TokenEstimate,
)
from resilient_llm.presets import AZURE_OPENAI, BEDROCK, GEMINI, OPENAI, PRESETS, VLLM, Preset
from resilient_llm.pricing import price_of
from resilient_llm.providers import DIALECTS as SPOKEN
from resilient_llm.routing.needs import Needs
from resilient_llm.target import CAPABILITIES, DIALECTS
from resilient_llm.telemetry.silent import SILENT

SECRET = "sk-CANARY-123"
RATE_LIMIT = RateLimit(limits=[Limit(key="target", requests_per_minute=1)])
GROQS = "gsk_CANARY0123456789abcdefABCDEF"  # could be a variable's name


def no_secret() -> str:
    raise OSError("the vault is closed")


@pytest.mark.parametrize(
    ("target", "name", "address", "port"),
    [
        (
            Target(url="https://api.openai.com/v1", provider="openai", model="gpt-4o"),
            "openai/gpt-4o",
            "api.openai.com",
            443,
        ),
        (Target(url="http://[::1]:8000/v1/", model="org/llama"), "::1/org/llama", "::1", 8000),
        (Target(url="http://h"), "h", "h", 80),
        (Target(provider="groq", model="modèle"), "groq/modèle", "", None),
        (Target(name="mine", url="https://h:444", address="10.0.0.1", port=99), "mine", "10.0.0.1", 99),
        (OPENAI.target(model="gpt-4o"), "openai/gpt-4o", "api.openai.com", 443),
        (OPENAI.target(), "openai", "api.openai.com", 443),
        (
            AZURE_OPENAI.target(url="https://r.openai.azure.com", model="d"),
            "azure/d",
            "r.openai.azure.com",
            443,
        ),
    ],
)
def test_what_it_is_called_and_where_it_is(target: Target, name: str, address: str, port: int | None) -> None:
    assert (target.name, target.address, target.port) == (name, address, port)


@pytest.mark.parametrize(
    ("provider", "url", "dialect"),
    [
        ("openai", None, "openai"),
        ("azure.ai.openai", None, "openai"),
        ("anthropic", None, "anthropic"),
        ("gcp.gemini", None, "gemini"),
        ("gcp.gemini", "https://h/v1beta/openai/", "openai"),
        ("aws.bedrock", None, None),
        ("gcp.vertex_ai", None, None),
        ("somebody", None, None),
        (None, "https://h", None),
    ],
)
def test_the_dialect_is_that_of_the_provider_where_there_is_one(
    provider: str | None, url: str | None, dialect: str | None
) -> None:
    assert Target(name="t", provider=provider, url=url).dialect == dialect
    assert Target(name="t", provider=provider, url=url, dialect="anthropic").dialect == "anthropic"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "needs a name"),
        ({"url": "ftp://h"}, "url='ftp://h': allowed are http and https"),
        ({"url": "api.openai.com/v1"}, "allowed are http and https"),
        ({"url": "https://"}, "with a host"),
        ({"url": f"https://user:{SECRET}@h/v1"}, "has credentials in it"),
        ({"url": f"https://h/v1?key={SECRET}"}, "has a query"),
        ({"url": f"https://h/v1#{SECRET}"}, "has a query or a fragment"),
        ({"url": f"https://h/{SECRET}\n"}, "blanks or other characters"),
        (
            {"url": f"https://h:{SECRET}"},
            "url=...: has a port that is none; allowed are whole numbers from 1 to 65535",
        ),
        ({"url": f"https://h:99999/{SECRET}"}, "url=...: has a port that is none; allowed are"),
        ({"url": f"https://h:0/{SECRET}"}, "url=...: has a port that is none; allowed are"),
        (
            {"url": f"https://[{SECRET}]/v1"},
            "url=...: is none that can be read; allowed are http and https URLs",
        ),
        ({"url": 7}, "url=... is of type int"),
        ({"name": 7}, "name=7: allowed are printable strings"),
        ({"name": "a\nb"}, "printable"),
        ({"model": ""}, "model='': allowed"),
        ({"provider": "a\r"}, "provider="),
        ({"weight": 0}, "weight=0: allowed are finite numbers above 0"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"weight": True}, "weight=True"),
        ({"context_window": 0}, "context_window=0: allowed are whole numbers from 1"),
        ({"context_window": 1e5}, "context_window="),
        ({"price": 2.5}, "price=2.5: allowed are a Price"),
        ({"capabilities": "tools"}, "capabilities='tools': allowed are sets"),
        ({"credentials": [SECRET]}, "credentials=... is of type list; allowed are lists of Credential"),
        ({"credential": SECRET}, "credential=... is of type str"),
        (
            {"dialect": "opnai"},
            "dialect: 'opnai' is unknown; known are 'openai', 'anthropic', 'bedrock', 'gemini'; did you",
        ),
        ({"capabilities": ["tools", "vison"]}, "'vison' is unknown"),
        ({"capabilities": ["tools", "vison"]}, "did you mean 'vision'?"),
        ({"policies": [CircuitBreaker]}, "did you forget to create it?"),
        ({"policies": ["x"]}, "policies[0]='x': allowed are callable objects"),
        ({"credentials": Credential(env="A")}, "given as credential="),
        ({"credential": Credential(env="A"), "credentials": [Credential(env="B")]}, "exclude each other"),
        ({"auth": f"Bearer {SECRET}"}, "auth=...: allowed are 'bearer'"),
        ({"headers": {"x": f"{SECRET}\r\ny: z"}}, "headers: 'x'"),
        ({"headers": {"x y": SECRET}}, "headers: 'x y'"),
        ({"headers": {"X-Org": SECRET, "x-org": "b"}}, "headers: 'x-org' is there twice, as 'X-Org' too"),
        (
            {"headers": {"X-Pass": SECRET}, "auth": "x-pass"},
            "headers: 'X-Pass' is what the secret goes out in",
        ),
        ({"auth": "content-length"}, "auth=...: allowed are 'bearer', names of headers"),
        ({"auth": "Host"}, "auth=...: allowed are 'bearer', names of headers"),
        ({"policies": [Deadline(1)]}, "target 't': Deadline must stand before the router"),
        ({"policies": [Retry()]}, "retry must stand before the router"),
        (
            {"policies": [CircuitBreaker(), ConcurrencyLimit()]},
            "concurrency_limit must stand before circuit",
        ),
        (
            {"policies": [CircuitBreaker(), RateLimit(limits=[Limit(key="target", requests_per_minute=1)])]},
            "stand before",
        ),
    ],
)
def test_what_cannot_be_is_said_without_a_secret(options: dict[str, Any], error: str) -> None:
    named = {} if not options else {"name": "t"}
    with pytest.raises(ConfigurationError) as caught:
        Target(**{**named, **options})
    assert error in str(caught.value)
    assert (
        "CANARY" not in "".join(traceback.format_exception(caught.value)).partition("ConfigurationError")[2]
    )


def test_dialects_and_capabilities_are_those_that_are_looked_for() -> None:
    assert set(DIALECTS) == {dialect.name for dialect in SPOKEN}
    asked = {
        "stream": True,
        "response_format": {"type": "json_schema"},
        "tools": [{"type": "function"}],
        "messages": [
            {"role": "user", "content": [{"type": "image_url"}, {"type": "input_audio"}]},
            {"role": "assistant", "content": "So"},
        ],
    }
    request = Request("POST", "http://h/v1/chat/completions", [], json.dumps(asked).encode())
    call = Call(
        request,
        read=lambda _request: Profile(model="m"),
        target=Target(name="t"),
        loop=None,  # type: ignore[arg-type]
        telemetry=SILENT,
        started=0.0,
    )
    assert Needs(call, TokenEstimate()).capabilities == set(CAPABILITIES)
    assert Target(name="t", capabilities=CAPABILITIES, dialect="gemini").capabilities == set(CAPABILITIES)


def test_its_own_policies_are_those_that_may_stand_below_a_router() -> None:
    policies: list[Policy] = [
        RATE_LIMIT,
        Bulkhead(max_concurrent=3, key="target"),
        ConcurrencyLimit(),
        CircuitBreaker(),
        AttemptTimeout(headers=1),
    ]
    assert Target(name="t", policies=policies).policies == tuple(policies)


def test_it_is_a_value_that_cannot_change_and_of_which_another_can_be_made() -> None:
    key = Credential(env="KEY")
    target = Target(name="t", url="https://h/v1/", credential=key, capabilities=["tools"], headers={"a": "b"})
    assert target.credentials == (key,)
    assert target.capabilities == {"tools"}
    assert target.url == "https://h/v1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.weight = 2  # type: ignore[misc]
    heavier = dataclasses.replace(target, weight=2)
    assert (heavier.weight, heavier.credentials, heavier.url) == (2, (key,), "https://h/v1")
    assert len({target, heavier, target}) == 2


def test_no_secret_shows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OWN_KEY", SECRET)
    caplog.set_level(logging.DEBUG)
    keys = [Credential(env="OWN_KEY"), Credential(value=lambda: SECRET, name="vault")]
    target = Target(name="t", url="https://h", credentials=keys, headers={"x-org": SECRET})
    target.check()
    assert [target.secret(0), target.secret(1)] == [SECRET, SECRET]
    for shown in (repr(target), str(target), repr(keys), repr(Router([target])), caplog.text):
        assert "CANARY" not in shown
    assert "OWN_KEY" in repr(target)
    assert "vault" in repr(target)


def test_a_missing_variable_is_named_with_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BATCH_KEY", raising=False)
    target = OPENAI.target(model="gpt-4o", credential=Credential(env="OPENAI_BATCH_KEY", name="batch"))
    expected = (
        "target 'openai/gpt-4o': credential 'batch': the environment variable OPENAI_BATCH_KEY is not set"
    )
    with pytest.raises(ConfigurationError) as built:
        target.check()
    with pytest.raises(NoTargetError) as used:
        target.secret(0)
    assert str(built.value) == str(used.value) == expected
    assert used.value.rejected == ("openai/gpt-4o:no_credential",)
    monkeypatch.setenv("OPENAI_BATCH_KEY", "")
    with pytest.raises(ConfigurationError, match="is not set"):
        target.check()


def test_a_function_is_asked_each_time_and_not_when_a_pipeline_is_built() -> None:
    tokens = iter(["one", "two\n"])
    target = Target(name="t", credential=Credential(value=lambda: next(tokens)))
    target.check()
    assert [target.secret(0), target.secret(0)] == ["one", "two"]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (no_secret, "credential 'vault': its function failed with OSError"),
        (lambda: None, "a string is expected, not NoneType"),
        (lambda: b"CANARY", "a string is expected, not bytes"),
        (lambda: " \n", "'vault': has nothing but blanks; allowed are visible ASCII characters"),
        (lambda: "CANARY\r\nx: y", "has a line break in it"),
        (lambda: "CANARY x", "has a blank in it"),
        (lambda: "CANARY-ö", "has a character in it that no header can hold"),
    ],
)
def test_what_a_function_may_give(value: Callable[[], str], error: str) -> None:
    target = Target(name="t", credential=Credential(value=value, name="vault"))
    with pytest.raises(NoTargetError) as caught:
        target.secret(0)
    assert error in str(caught.value)
    assert "CANARY" not in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError) == (value is no_secret)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "needs one of env="),
        ({"env": "A", "value": no_secret}, "needs one of env="),
        ({"env": SECRET}, "not the name of an environment variable"),
        ({"env": GROQS}, "not the name of an environment variable"),
        ({"env": 7}, "not the name"),
        ({"value": SECRET}, "allowed are functions"),
        ({"env": "A", "name": "a\nb"}, "name='a\\nb'"),
        ({"env": "A", "purposes": "batch"}, "purposes='batch': allowed are sets"),
        ({"env": "A", "purposes": [""]}, "purposes="),
        ({"env": "A", "max_concurrent": 0}, "max_concurrent=0"),
        ({"env": "A", "max_concurrent": 1.5}, "max_concurrent=1.5"),
        ({"env": "A", "requests_per_minute": 0}, "requests_per_minute=0"),
        ({"env": "A", "requests_per_minute": float("inf")}, "requests_per_minute=inf"),
    ],
)
def test_a_credential_that_cannot_be(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Credential(**options)
    assert error in str(caught.value)
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("connection", "close", "cannot be given, since each connection decides it"),
        ("TE", "trailers", "each connection decides it"),
        ("Upgrade", "h2c", "each connection decides it"),
        ("transfer-encoding", "chunked", "each connection decides it"),
        ("expect", "100-continue", "each connection decides it"),
        ("Content-Length", "5", "cannot be given, since the body of each request decides it"),
        ("content-encoding", "gzip", "the body of each request decides it"),
        ("host", "a b", "allowed are a host, and a host with a port"),
        ("host", "", "allowed are a host, and a host with a port"),
        ("host", "h/path", "allowed are a host, and a host with a port"),
    ],
)
def test_headers_that_would_fail_every_call_are_refused(name: str, value: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Target(name="t", headers={"x-org": "a", name: value})
    assert str(caught.value).startswith(f"headers[{name!r}]={value!r}: ")
    assert why in str(caught.value)


@pytest.mark.parametrize("host", ["virtual.example", "virtual.example:8443", "[::1]:80", "10.0.0.1"])
def test_a_host_of_its_own_is_allowed(host: str) -> None:
    assert Target(name="t", headers={"Host": host}).headers == {"Host": host}


def test_a_credential_is_called_by_its_variable() -> None:
    assert Credential(env="OPENAI_API_KEY").name == "OPENAI_API_KEY"
    assert Credential(value=no_secret).name == "credential"
    assert Credential(env="A", purposes=["batch", "batch"]).purposes == frozenset({"batch"})


def test_its_price_is_its_own_or_the_published_one() -> None:
    own = Price(input=1, output=2)
    assert OPENAI.target(model="gpt-4o", price=own).price_for() is own
    assert OPENAI.target(model="gpt-4o").price_for() == price_of("openai", "gpt-4o") != None  # noqa: E711
    assert OPENAI.target().price_for() is None
    assert OPENAI.target().price_for("gpt-4o") == price_of("openai", "gpt-4o")
    assert VLLM.target(url="http://h", model="gpt-4o").price_for() is None


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_every_preset_makes_targets_with_state_of_their_own(preset: Preset) -> None:
    url = preset.url or "https://own.example/v1"
    one, other = (preset.target(model="m", url=url, credential=Credential(env="KEY")) for _ in range(2))
    assert [type(policy) for policy in one.policies] == [ConcurrencyLimit, CircuitBreaker]
    assert not set(map(id, one.policies)) & set(map(id, other.policies))
    assert (one.provider, one.dialect, one.url) == (preset.provider, preset.dialect, url)
    assert one.name == f"{preset.name}/m"
    Router([one, dataclasses.replace(other, name="other")])


def test_a_presets_policies_can_be_replaced_and_added_to() -> None:
    circuit, limit, clocks = CircuitBreaker(), ConcurrencyLimit(initial=3, max=3), AttemptTimeout(headers=1)
    target = OPENAI.target(
        model="gpt-4o",
        tier="tier-1",
        circuit_breaker=circuit,
        concurrency_limit=limit,
        attempt_timeout=clocks,
    )
    rate, *others = target.policies
    assert isinstance(rate, RateLimit)
    assert rate.limits[0].requests_per_minute == 500
    assert others == [limit, circuit, clocks]
    assert OPENAI.target(model="m", rate_limit=rate).policies[0] is rate


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: AZURE_OPENAI.target(model="m"), "preset 'azure' needs the URL"),
        (lambda: BEDROCK.target(model="m"), "needs the URL"),
        (lambda: OPENAI.target(model="m", tier="tier-1"), "'m' is no model of openai tier-1"),
        (
            lambda: OPENAI.target(tier="tier-1", rate_limit=OPENAI.rate_limit(requests_per_minute=1)),
            "exclude each other",
        ),
    ],
)
def test_what_a_preset_cannot_make(make: Callable[[], Target], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        make()


def test_a_preset_knows_where_a_provider_speaks_openais_dialect() -> None:
    target = GEMINI.target(model="gemini-2.5-flash", dialect="openai")
    assert target.url == "https://generativelanguage.googleapis.com/v1beta/openai"
    assert target.dialect == "openai"
    assert OPENAI.target(dialect="openai").url == OPENAI.url
