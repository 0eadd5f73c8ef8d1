"""Configurations: what is wrong is named with its place, what is right makes what it says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from resilient_llm import AttemptTimeout, CircuitBreaker, ConcurrencyLimit, RateLimit
from resilient_llm.sidecar import Config, ConfigError, load, parse
from resilient_llm.sidecar.check import check
from resilient_llm.sidecar.config import key_hashes
from resilient_llm.sidecar.options import QuotaOptions
from resilient_llm.sidecar.parts import Parts
from resilient_llm.sidecar.problems import dotted
from resilient_llm.sidecar.server import run
from resilient_llm.sidecar.tables import TLS, Server, TenantBudget
from resilient_llm.sidecar.targets import Targets
from resilient_llm.sidecar.toml_lines import lines_of
from tests.sidecar.certificates import Authority

EXAMPLES = Path("examples/gateway")
TARGET = '[targets.main]\nurl = "http://localhost:8000/v1"\n'
OF_NOTHING, OF_A_LINE, OF_A_KEY = (hashlib.sha256(what).hexdigest() for what in (b"", b"\n", b"key"))

ERRORS = {
    "a table is misspelled": (
        TARGET + "[tenents.a]",
        "3: tenents: unknown key; allowed are",
        "did you mean tenants?",
    ),
    "a key is misspelled": (
        TARGET + "wieght = 2",
        "3: targets.main.wieght: unknown key",
        "did you mean weight?",
    ),
    "a preset is misspelled": (
        '[targets.main]\npreset = "opnai"',
        '2: targets.main.preset = "opnai": allowed are anthropic, ',
        "did you mean openai?",
    ),
    "no targets": ("[server]\nport = 1", "targets: is missing"),
    "a target is nowhere": (
        "[targets.main]\nweight = 2",
        "1: targets.main = {weight}: a target needs a url, or a preset",
    ),
    "a preset without a URL": ('[targets.a]\npreset = "azure"', "1: targets.a: preset azure needs the url"),
    "a port out of range": (
        TARGET + "[server]\nport = 99999",
        "4: server.port = 99999: allowed are numbers up to 65535",
    ),
    "a string for a number": (TARGET + 'weight = "2"', '3: targets.main.weight = "2": allowed are numbers'),
    "a float for a count": (
        TARGET + "[retry]\nmax_attempts = 2.5",
        "4: retry.max_attempts = 2.5: allowed are whole numbers",
    ),
    "a number for a switch": (
        TARGET + "passthrough = 1",
        "3: targets.main.passthrough = 1: allowed are true and false",
    ),
    "infinity": (TARGET + "[server]\ndeadline = inf", "4: server.deadline = inf: allowed are finite numbers"),
    "zero seconds": (
        TARGET + "[server]\ndeadline = 0",
        "4: server.deadline = 0: allowed are numbers above 0",
    ),
    "a balancer that is none": (
        TARGET + '[routing]\nbalancer = "round_robin"',
        '4: routing.balancer = "round_robin": allowed are cheapest, ',
    ),
    "a model without targets": (
        TARGET + "[models.fast]\ntargets = []",
        "4: models.fast.targets = []: allowed are entries from 1",
    ),
    "a model of a target that is not": (
        TARGET + '[models.fast]\ntargets = ["mian/gpt"]',
        '4: models.fast.targets[0] = "mian": allowed are main; did you mean main?',
    ),
    "a fallback that is not": (
        TARGET + '[models.fast]\ntargets = "main"\nfallbacks = ["smart"]',
        '5: models.fast.fallbacks = "smart": allowed are none',
    ),
    "a tenant's model that is not": (
        TARGET + '[models.fast]\ntargets = "main"\n[tenants.a]\nkey_env = "A"\nmodels = ["fats"]',
        '7: tenants.a.models = "fats": allowed are fast; did you mean fast?',
    ),
    "a tier of a model that is not": (
        TARGET + '[models.fast]\ntargets = "main"\n[tiers.auto]\ntiers = [{model = "slow"}]',
        '6: tiers.auto.tiers[0].model = "slow": allowed are fast',
    ),
    "tiers out of order": (
        TARGET + '[models.a]\ntargets = "main"\n[models.b]\ntargets = "main"\n'
        '[tiers.auto]\ntiers = [{model = "a", up_to = 0.9}, {model = "b", up_to = 0.5}]',
        "8: tiers.auto.tiers = [{model, up_to}, {model, up_to}]: up_to is [0.9, 0.5]; allowed are tiers in",
    ),
    "a tenant without a key": (
        TARGET + "[tenants.a]\nweight = 2",
        "3: tenants.a = {weight}: a tenant needs key_env or key_sha256",
    ),
    "a hash that is none": (TARGET + '[tenants.a]\nkey_sha256 = "abc"', "64 hexadecimal digits"),
    "a tenant whose variable is not set": (
        TARGET + '[tenants.a]\nkey_env = "NOT_THERE"',
        "4: tenants.a.key_env: the environment variable NOT_THERE is not set",
    ),
    "a quota of nothing": (
        TARGET + "[quota]\nmax_wait = 1",
        "3: quota = {max_wait}: give at least one of requests_per_minute",
    ),
    "open to everybody by accident": (
        TARGET + '[server]\nhost = "0.0.0.0"',
        '4: server.host = "0.0.0.0": without tenants anybody',
    ),
    "an admin listener for everybody": (
        TARGET + '[admin]\nhost = "0.0.0.0"',
        '4: admin.host = "0.0.0.0": not on loopback it needs admin.token_env',
    ),
    "a name that is a path": (
        TARGET + '[targets."a/b"]\nurl = "http://x/v1"',
        '3: targets."a/b": allowed are names of letters',
    ),
    "a name that is taken": (
        TARGET + '[targets.v1]\nurl = "http://x/v1"',
        "3: targets.v1: this name is taken",
    ),
    "a URL with a key in it": (
        '[targets.a]\nurl = "http://user:pw@x/v1"',
        '2: targets.a.url = "...": has credentials in it; a key is put in an environment variable that api_key_env',
    ),
    "options that contradict each other": (
        TARGET + "[targets.main.circuit]\nbreak_duration = 60\nmax_break_duration = 5",
        "5: targets.main.circuit.max_break_duration = 5.0: ",
    ),
    "backoff that contradicts itself": (
        TARGET + "[retry]\nbackoff = {initial = 5, maximum = 1}",
        "4: retry.backoff.maximum = 1.0: allowed are finite seconds from initial=5.0",
    ),
    "streams gone on with by nobody": (
        TARGET + '[stream]\nresume = "continue"',
        "4: stream.resume: resume='continue' needs prefill=",
    ),
    "a URL of another scheme": (
        '[targets.a]\nurl = "ftp://x"',
        "2: targets.a.url = 'ftp://x': allowed are http and https URLs",
    ),
    "a header that cannot be sent": (
        '[targets.a]\nurl = "http://x/v1"\nheaders = {"x a" = "b"}',
        "3: targets.a.headers: 'x a' is no header",
    ),
    "a limit outside its own bounds": (
        TARGET + "concurrency = {initial = 50, max = 10}",
        "3: targets.main.concurrency.initial = 50: allowed are counts",
    ),
    "a model with a target twice": (
        TARGET + '[models.fast]\ntargets = ["main/a", {target = "main", model = "a"}]',
        '4: models.fast.targets[1] = "main/a": is there already',
    ),
    "a canary by what is no key": (
        TARGET + '[models]\na.targets = "main/a"\nb.targets = "main/b"\n'
        '[canary.c]\nmodel = "a"\ncandidate = "b"\nkey = "user"',
        '9: canary.c.key[0] = "user": allowed are model, target, tenant',
    ),
    "a canary that goes back": (
        TARGET + '[models]\na.targets = "main/a"\nb.targets = "main/b"\n'
        '[canary.c]\nmodel = "a"\ncandidate = "b"\nsteps = [0.5, 0.2]',
        "9: canary.c.steps = [0.5, 0.2]: allowed are rising shares",
    ),
    "a budget of nothing": (
        TARGET + '[budget]\nunpriced = "allow"',
        "3: budget: has no cap; allowed are usd_per_day",
    ),
    "a date for a number": (
        TARGET + "[quota]\nrequests_per_minute = 1979-05-27",
        "4: quota.requests_per_minute = 1979-05-27: allowed are numbers",
    ),
    "a number without end": (TARGET + f"weight = {'9' * 5000}", "not TOML: Exceeds the limit"),
    "a name that draws on the terminal": (
        TARGET + '[server]\n"\\u001b[31mx\\n\\u202e" = 1',
        r'4: server."\u001b[31mx\n\u202e": unknown key',
    ),
    "one port for everybody": (
        TARGET + "[server]\nport = 8080\n[admin]\nport = 8080",
        "6: admin.port = 8080: the listener for callers has this port",
    ),
    "one port, at all addresses and at one": (
        TARGET + '[server]\nhost = "::"\nopen = true\nport = 8080\n[admin]\nport = 8080',
        "8: admin.port = 8080: the listener for callers has this port",
    ),
    "an origin without a scheme": (
        TARGET + '[server]\ncors_origins = ["app.example"]',
        '4: server.cors_origins = ["app.example"]: origins are expected',
    ),
    "every origin": (TARGET + '[server]\ncors_origins = ["*"]', "origins are expected as browsers send them"),
    "a collector without a scheme": (
        TARGET + '[telemetry]\notlp_endpoint = "collector:4317"',
        '4: telemetry.otlp_endpoint = "collector:4317": the URL of a collector',
    ),
    "a tier of no preset": (TARGET + 'tier = "tier-1"', "a tier is one of a preset"),
    "a hedge that begins too late": (
        TARGET + "[hedge]\nat_least = 1e9",
        "3: hedge: no hedge fits: of the deadline of 600 s there have to be 0.1 s left when it is made",
        "after at_least=1e+09 s",
    ),
    "models that go on, of streams that are not gone on with": (
        TARGET + '[stream]\nprefill = ["m"]',
        "4: stream.prefill = ['m']: allowed only with resume='continue'",
    ),
    "a tier whose limits are those of models": (
        '[targets.a]\npreset = "openai"\ntier = "tier-1"',
        "3: targets.a.tier: model is missing: limits of openai tier-1 are those of ",
    ),
    "a tier that is none": (
        '[targets.a]\npreset = "openai"\nmodel = "gpt-4o"\ntier = "tier-9"',
        "4: targets.a.tier: 'tier-9' is no tier of openai: 'tier-1', ",
    ),
    "no TOML": ("[targets", "not TOML"),
    "a header that connections decide": (
        TARGET + 'headers = {x-org = "a", connection = "close"}',
        "3: targets.main.headers.connection = 'close': cannot be given, since each connection decides it",
    ),
    "a header that bodies decide": (
        TARGET + '[targets.main.headers]\nx-org = "a"\nContent-Length = "5"',
        "5: targets.main.headers.Content-Length = '5': cannot be given, since the body",
    ),
    "a port that is none": (
        '[targets.a]\nurl = "http://x:99999/v1"',
        '2: targets.a.url = "http://x:99999...": has a port that is none; allowed are whole numbers from 1 to 65535',
    ),
    "no URL": (
        '[targets.a]\nurl = ""',
        '2: targets.a.url = "": has no scheme; allowed are http and https URLs',
    ),
    "a way to show a key that may be one": (
        TARGET + 'auth = "x y"',
        """3: targets.main.auth = "...": allowed are 'bearer', names of headers""",
    ),
    "a share of slots that there are none of": (
        TARGET + "[bulkhead]\nmax_queued_total = 5",
        "4: bulkhead.max_queued_total = 5: allowed only with shared=",
    ),
    "a percentile of all": (TARGET + "[hedge]\npercentile = 1.0", "4: hedge.percentile = 1.0: allowed are"),
    "an SLO that is sure": (
        TARGET + '[models]\na.targets = "main/a"\nb.targets = "main/b"\n'
        '[canary.c]\nmodel = "a"\ncandidate = "b"\nslo = {confidence = 1.0}',
        "9: canary.c.slo.confidence = 1.0: allowed are numbers between",
    ),
    "a hedge that comes too late": (
        TARGET + "[server]\ndeadline = 1\n[hedge]\ndelay = 3",
        "5: hedge: no hedge fits: ",
    ),
    "a variable that has no store's URL": (
        TARGET + '[store]\nredis_env = "NO_URL"',
        "4: store.redis_env: the URL in the environment variable NO_URL is none of a store: Redis URL must",
    ),
    "a number for a name, or several": (
        TARGET + "api_key_env = 3",
        "3: targets.main.api_key_env = 3: a string, or a list of strings, is expected",
    ),
    "a number for the targets of a model": (
        TARGET + "[models.a]\ntargets = 3",
        '4: models.a.targets = 3: "target", "target/model", a table, or a list of these is expected',
    ),
    "a list in a list of targets": (
        TARGET + '[models.a]\ntargets = [["main"]]',
        '4: models.a.targets[0] = ["main"]: "target", "target/model" or a table is expected',
    ),
    "a window beyond all": (
        TARGET + "context_window = 99999999999999999999",
        "3: targets.main.context_window = 99999999999999999999: allowed are numbers below 1000000000000",
    ),
    "a weight beyond all": (
        TARGET + "[models.a]\ntargets = {target = 'main', weight = 1e300}",
        "4: models.a.targets[0].weight = 1e+300: allowed are numbers below 1e+12",
    ),
    "a collector at a port that is none": (
        TARGET + '[telemetry]\notlp_endpoint = "http://collector:99999"',
        '4: telemetry.otlp_endpoint = "http://collector:99999": the URL of a collector',
    ),
    "the hash of no key": (
        TARGET + f'[tenants.a]\nkey_sha256 = "{OF_NOTHING}"',
        '4: tenants.a.key_sha256 = "...": is the hash of no key at all',
    ),
    "the hash of a line break": (
        TARGET + f'[tenants.a]\nkey_sha256 = ["{OF_A_KEY}", "{OF_A_LINE}"]',
        "is the hash of no key at all, which nobody can show: was $KEY set?",
    ),
    "a store without a URL": (
        TARGET + '[store]\nredis_env = "NO_REDIS"',
        "4: store.redis_env: the environment variable NO_REDIS is not set",
    ),
}


@pytest.mark.parametrize(
    ("text", "expected"), [(text, expected) for text, *expected in ERRORS.values()], ids=ERRORS
)
def test_errors_name_the_place_the_value_and_what_is_allowed(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        check(file, environ={"NO_URL": "://x"})
    for part in expected:
        assert part in str(refused.value)
    assert str(refused.value).startswith(f"{file}:")


@pytest.mark.parametrize(
    ("table", "missing", "why"),
    [
        (
            '[store]\nredis_env = "STORE"',
            ["redis.asyncio", "resilient_llm.stores.redis"],
            "3: store: needs redis-py: pip install 'resilient-llm[redis]'",
        ),
        (
            '[telemetry]\notlp_endpoint = "http://collector:4318"',
            ["opentelemetry.exporter.otlp.proto.http.trace_exporter"],
            "4: telemetry.otlp_endpoint: needs OpenTelemetry's OTLP exporter: pip install 'resilient-llm[otel]'",
        ),
    ],
    ids=["store", "otlp"],
)
def test_a_table_whose_extra_is_not_installed_is_told_by_its_place(
    table: str,
    missing: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORE", "redis://localhost")
    package, *loaded = missing
    monkeypatch.setitem(sys.modules, package, None)
    for name in loaded:
        monkeypatch.delitem(sys.modules, name, raising=False)
    file = tmp_path / "gateway.toml"
    file.write_text(TARGET + table)
    for attempt in (
        lambda: check(file, environ=None),
        lambda: check(file, environ=os.environ),
        lambda: asyncio.run(run(file)),
    ):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert str(refused.value) == f"{file}:{why}"


def test_a_variable_that_is_not_set_is_told_alike_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    file = tmp_path / "gateway.toml"
    file.write_text(TARGET + 'api_key_env = "NOT_THERE"')
    for attempt in (lambda: check(file, environ=os.environ), lambda: asyncio.run(run(file))):
        with pytest.raises(ConfigError) as refused:
            attempt()
        why = "3: targets.main.api_key_env: the environment variable NOT_THERE is not set"
        assert str(refused.value) == f"{file}:{why}"


@pytest.mark.parametrize(
    "origin",
    [
        "http://[::1",
        "http://[::g]",
        "http://::1",
        "http://h:99999",
        "http://h:0",
        "http://h:080",
        "http://h:80",
        "https://h:443",
        "http://h:",
        "http://me@h",
        "http://h\u00e9",
    ],
)
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="origins are expected as browsers send them"):
        parse(f'{TARGET}[server]\ncors_origins = ["{origin}"]')


@pytest.mark.parametrize(
    "origin",
    [
        "http://[::1]",
        "http://[2001:db8::1]:8080",
        "https://app.example:8443",
        "http://localhost:443",
        "http://my_host",
        "chrome-extension://abcdefghijklmnop",
        "app://.",
    ],
)
def test_origins_are_those_that_browsers_send(origin: str) -> None:
    assert parse(f'{TARGET}[server]\ncors_origins = ["{origin}"]').server.cors_origins == [origin]


TENANT = '[tenants.a]\nkey_env = "K"\n'


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "a b",
        "[::1]",
        "127.0.0.1:80",
        "::1 ",
        "127.0.0.300",
        "127.1",
        "0",
        "a..b",
        "a.-:80",
        "*",
        "a" * 64,
    ],
)
@pytest.mark.parametrize("table", ["server", "admin"])
def test_hosts_that_no_socket_can_have_are_refused(table: str, host: str) -> None:
    token = '\ntoken_env = "T"' if table == "admin" else ""
    with pytest.raises(ConfigError) as refused:
        parse(f'{TARGET}{TENANT}[{table}]\nhost = "{host}"{token}', file="g")
    assert str(refused.value).startswith(f'g:6: {table}.host = "{host[:50]}')
    assert "an address or a host's name is expected, without port or brackets" in str(refused.value)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "0.0.0.0",
        "::",
        "::1",
        "fe80::1%eth0",
        "localhost",
        "sidecar",
        "my-host.example",
        "a.example.",
        "1a",
    ],
)
def test_hosts_are_addresses_and_names(host: str) -> None:
    assert parse(f'{TARGET}{TENANT}[server]\nhost = "{host}"').server.host == host


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("abcdefghij\r\nx: 0123456789", "has a line break in it"),
        ("abcdefghij 0123456789", "has a blank in it"),
        ("abcdefghij-ö-0123456789", "has a character in it that no header can hold"),
        (" \n", "has nothing but blanks"),
    ],
)
def test_a_key_that_cannot_be_sent_is_told_by_its_place(
    key: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", key)
    file = tmp_path / "gateway.toml"
    file.write_text(TARGET + 'weight = 1\napi_key_env = "PROVIDER_KEY"\n')
    with pytest.raises(ConfigError) as refused:
        check(file, environ={"PROVIDER_KEY": key})
    message = str(refused.value)
    assert message.startswith(f"{file}:4: targets.main.api_key_env: ")
    assert f"the environment variable PROVIDER_KEY {why}" in message
    assert "abcdefghij" not in message


def test_a_tenants_key_that_nobody_can_send_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(TARGET + '[admin]\ntoken_env = "T"\n[tenants.a]\nkey_env = "K"\n')
    good, bad = "abcdefghij0123456789", "abcdefghij\n0123456789"
    for environ, where in (
        ({"K": bad, "T": good}, ":6: tenants.a.key_env: the environment variable K has a key with a line"),
        ({"K": good, "T": bad}, ":4: admin.token_env: the environment variable T has a token with a line"),
    ):
        with pytest.raises(ConfigError) as refused:
            check(file, environ=environ)
        assert where in str(refused.value)
        assert "abcdefghij" not in str(refused.value)


def test_a_tenants_key_may_have_bytes_that_are_no_text() -> None:
    raw = b"abcdefghij-\xff-0123456789"
    config = parse(TARGET + '[tenants.a]\nkey_env = "K"\n')
    assert key_hashes(config, {"K": os.fsdecode(raw)}) == {hashlib.sha256(raw).digest(): "a"}


@pytest.mark.parametrize(
    "text",
    [
        TARGET + 'api_key = "sk-proj-abcdefghij0123456789"',
        TARGET + 'api_key_env = "sk-proj-abcdefghij0123456789"',
        TARGET + '[tenants.a]\nkey = "sk-proj-abcdefghij0123456789"',
        TARGET + '[tenants.a]\nkey_sha256 = "sk-proj-abcdefghij0123456789"',
        TARGET + '[tenants.a]\nkey_env = "sk-proj-abcdefghij0123456789"',
        TARGET + '[admin]\ntoken_env = "sk-proj-abcdefghij0123456789"',
        TARGET + '[store]\nredis_env = "redis://:sk-proj-abcdefghij0123456789@x"',
        TARGET + 'weight = "sk-proj-abcdefghij0123456789"',
        TARGET + 'auth = "abcdefghij klm"',
        '[targets.a]\nurl = "http://user:abcdefghij@h:99999/v1"',
        '[targets.a]\nurl = "http://user:abcdefghij/x@h/v1"',
        '[targets.a]\nurl = "user:abcdefghij@h/v1"',
        '[targets.a]\nurl = "sk-abcdefghij"',
        '[targets.a]\nurl = "http://h:99999/abcdefghij"',
        '[targets.a]\nurl = "http://h:abcdefghij"',
    ],
)
def test_no_error_repeats_a_secret(text: str, tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        check(file, {})
    assert "abcdefghij" not in str(refused.value)
    assert "abcdefghij" not in repr(refused.value)


def test_all_problems_are_told_at_once_in_order() -> None:
    with pytest.raises(ConfigError) as refused:
        parse(TARGET + "wieght = 1\n[server]\nport = -1\n[retry]\nmax_attempts = 0\n", file="g.toml")
    assert [line.split(":")[1] for line in str(refused.value).splitlines()] == ["3", "5", "7"]


FAULTY = """\
[server]
host = "not a host"
[retry]
max_attempts = 0
[hedge]
delay = 1
quantile = 2.0
[targets.main]
url = "ftp://x"
[targets.typo]
url = "http://localhost/v1"
wieght = 1
[targets.keyless]
preset = "openai"
api_key_env = "NOT_SET"
[targets.spare]
preset = "azure"
[models.fast]
targets = ["main", "mian"]
[models.slow]
targets = ["typo"]
fallbacks = ["fast", "fsat"]
[tenants.acme]
key_env = "acme's key"
[tenants.globex]
key_env = "NOT_SET_EITHER"
[tenants.initech]
key_sha256 = "{hash}"
models = ["fast", "slwo"]
[canary.new]
model = "fast"
candidate = "slow"
steps = [0.5, 0.1]
[budget]
usd_per_day = -1
[telemetry]
otlp_endpoint = "nowhere"
"""


def test_every_fault_of_a_file_is_told_in_one_run(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    text = FAULTY.replace("{hash}", OF_A_KEY)
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        check(file, {})
    told = str(refused.value).splitlines()
    wrong = [
        "host = ", "max_attempts", "quantile", "ftp://", "wieght", '"NOT_SET"', "[targets.spare]", '"mian"', '"fsat"',
        "acme's key", "NOT_SET_EITHER", '"slwo"', "steps", "-1", "nowhere",
    ]  # fmt: skip
    lines = text.splitlines()
    expected = [next(number for number, line in enumerate(lines, 1) if one in line) for one in wrong]
    assert sorted(set(expected)) == sorted({int(line.split(":")[1]) for line in told}), "\n".join(told)
    assert len(told) == len(set(told))


@pytest.mark.parametrize(
    "text",
    [
        TARGET + "wieght = 1\n[server]\nhost = '0.0.0.0'\n[tenants.a]\nkey_env = 'not a name'\n",
        TARGET + "wieght = 1\n[routing]\ndefault = 'm'\n[models.m]\ntargets = ['main', 'main/x']\n",
        TARGET + "[server]\nport = -1\n[admin]\nport = 8080\n",
        TARGET + "[admin]\nhost = '0.0.0.0'\ntoken_env = 'NOT_SET'\n",
        TARGET + "[server]\nhost = '0.0.0.0'\n[tenents.a]\nkey_env = 'KEY'\n",
        TARGET + "[models.m]\ntargets = 1\n[tiers.t]\ntiers = [{model = 'm'}]\n[canary.c]\nmodel = 'm'\n"
        "candidate = 'n'\n[models.n]\ntargets = 'main'\n",
        TARGET + "[models.m]\ntargets = 'main'\n[tiers.t]\ntiers = [{model = 'x'}]\n"
        "[tenants.a]\nkey_env = 'KEY'\nmodels = ['t']\n",
        "models = 1\n" + TARGET + "[routing]\ndefault = 'm'\n",
        "targets = 1\n[models]\nm.targets = 'main'\n",
        "not TOML",
    ],
)  # fmt: skip
def test_one_fault_makes_no_others(text: str, tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        check(file, {"KEY": "a-key-of-some-tenant"})
    assert len(refused.value.problems) == (2 if "not a name" in text else 1), str(refused.value)


def test_a_budget_that_knows_no_prices_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "g.toml"
    file.write_text(TARGET + "[budget]\nusd_per_day = 1\n")
    monkeypatch.setattr("resilient_llm.sidecar.check.find_spec", lambda _name: object())
    assert "note" not in check(file, {})
    monkeypatch.setattr("resilient_llm.sidecar.check.find_spec", lambda _name: None)
    assert "note     a budget refuses calls without a price, and of main" in check(file, {})
    of_a_model = "[models.m]\ntargets = {target = 'main', price = {input = 1, output = 1}}\n"
    of_a_target = "[targets.main.price]\ninput = 1\noutput = 1\n"
    for more in ("unpriced = 'allow'\n", "dry_run = true\n", of_a_target, of_a_model):
        file.write_text(TARGET + "[budget]\nusd_per_day = 1\n" + more)
        assert "note" not in check(file, {})
    file.write_text(TARGET)
    assert "note" not in check(file, {})


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("[models]\nm.targets = 1\n", ["targets", "models.m.targets"]),
        ("targets = 1\n[models]\nm = 1\n", ["targets", "models.m"]),
        ("targets = []\nmodels = 1\n[tiers]\nt = 1\n", ["targets", "models", "tiers.t"]),
        ("models = []\n" + TARGET + "[tiers]\nt = 1\n", ["models", "tiers.t"]),
        (TARGET + f"weight = {hex(1 << 20000)}\n", ["targets.main.weight"]),
    ],
)  # fmt: skip
def test_faults_that_need_one_another_are_told(text: str, places: list[str], tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        check(file, {})
    assert sorted(dotted(problem.path) for problem in refused.value.problems) == sorted(places)
    assert all(len(line) < 400 for line in str(refused.value).splitlines())


def test_five_lines_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    file = EXAMPLES / "five_lines.toml"
    assert len(file.read_text().splitlines()) <= 5
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    assert "targets  openai" in check(file, environ={"OPENAI_API_KEY": "sk-x"})


def test_fifty_lines_are_complete() -> None:
    file = EXAMPLES / "gateway.toml"
    config = load(file)
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 50
    # Nothing that a configuration can have is missing in the example, but for what excludes something else in it.
    assert config.model_fields_set == set(Config.model_fields)
    summary = check(file, environ=None)
    for policy in (
        "Deadline",
        "bulkhead",
        "quotas",
        "budget",
        "cache",
        "tiers",
        "stream",
        "retry",
        "hedge",
        "router",
    ):
        assert policy in summary


def test_a_target_stands_for_several_models() -> None:
    config = parse(
        TARGET
        + """
        [models.a]
        targets = ["main/x", { target = "main", weight = 2 }]
        [models.b]
        targets = ["main/x", { target = "main", model = "x", weight = 3, price = { input = 1, output = 2 } }]
        [models.c]
        targets = "main"
        """
    )
    targets = Targets(config, Parts(), None)
    models = targets.models()
    names = {
        model: [(target.name, target.model, target.weight) for target in listed]
        for model, listed in models.items()
    }
    assert names == {
        "a": [("main/x", "x", 1), ("main@a", None, 2)],
        "b": [("main/x", "x", 1), ("main/x@b", "x", 3)],
        "c": [("main", None, 1)],
    }
    assert models["a"][0] is models["b"][0]
    # All of them have the limits of the one they are made of.
    assert [name for name, _ in targets.circuits()["main"]] == ["main", "main/x", "main@a", "main/x@b"]
    assert len({breaker for _, breaker in targets.circuits()["main"]}) == 1


def test_a_targets_policies_are_those_of_its_table() -> None:
    config = parse("""
        [targets.bare]
        url = "http://x/v1"
        concurrency.enabled = false
        circuit.enabled = false
        [targets.full]
        url = "http://x/v1"
        quota.requests_per_minute = 60
        concurrency.max = 7
        circuit.consecutive_failures = 3
        timeouts.headers = 5
        """)
    bare, full = (Targets(config, Parts(), None).by_name[name] for name in ("bare", "full"))
    assert bare.policies == ()
    quota, concurrency, circuit, clocks = full.policies
    assert isinstance(quota, RateLimit)
    assert isinstance(concurrency, ConcurrencyLimit)
    assert isinstance(circuit, CircuitBreaker)
    assert isinstance(clocks, AttemptTimeout)
    assert (quota.requests_per_minute, concurrency.max, circuit.consecutive_failures, clocks.headers) == (
        60,
        7,
        3,
        5,
    )


def test_keys_are_known_by_their_hashes() -> None:
    digest = hashlib.sha256(b"another-key-0123456789").hexdigest()
    config = parse(TARGET + f'[tenants.a]\nkey_env = ["A1", "A2"]\nkey_sha256 = "{digest}"\n')
    hashes = key_hashes(config, {"A1": "first-key-0123456789", "A2": "second-key-0123456789\n"})
    assert set(hashes) == {
        hashlib.sha256(key).digest()
        for key in (b"first-key-0123456789", b"second-key-0123456789", b"another-key-0123456789")
    }
    with pytest.raises(ConfigError, match="less than 16"):
        key_hashes(config, {"A1": "short", "A2": "second-key-0123456789"})
    two = parse(TARGET + '[tenants.a]\nkey_env = "A"\n[tenants.b]\nkey_env = "A"\n')
    with pytest.raises(ConfigError, match="tenant a has too"):
        key_hashes(two, {"A": "first-key-0123456789"})
    operator = parse(TARGET + '[admin]\ntoken_env = "T"\n[tenants.a]\nkey_env = "A"\n')
    with pytest.raises(ConfigError, match="T has a key of tenant a, who would be an operator"):
        key_hashes(operator, {"A": "first-key-0123456789", "T": "first-key-0123456789\n"})
    assert len(key_hashes(operator, {"A": "first-key-0123456789", "T": "other-key-0123456789"})) == 1


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(TARGET, "utf-8-sig")
    assert parse(file.read_bytes()) == parse(file.read_bytes().decode()) == parse(TARGET)
    file.write_text("[targets.main]\npreset = 'azure'\n", "utf-8-sig")
    with pytest.raises(ConfigError, match=r"gateway\.toml:1: targets\.main: "):
        check(file, environ={})


def test_what_operators_are_shown_has_no_secrets() -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    config = parse(TARGET + f'headers = {{x-org = "private"}}\n[tenants.a]\nkey_sha256 = "{digest}"\n')
    shown = json.dumps(config.redacted())
    assert digest not in shown
    assert "private" not in shown


def test_the_schema_describes_every_table() -> None:
    schema = Config.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(Config.model_fields)
    assert {"type": "string"} in schema["$defs"]["TargetOptions"]["properties"]["api_key_env"]["anyOf"]


def _paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from _paths(inner, (*path, key))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_lines_are_found(file: Path) -> None:
    text = file.read_text()
    lines = lines_of(text)
    source = text.splitlines()
    found = [path for path in _paths(tomllib.loads(text)) if path in lines]
    assert len(found) > 2
    for path in found:
        assert re.search(rf'["\[.]?{re.escape(str(path[-1]))}', source[lines[path] - 1])


@pytest.mark.parametrize(
    "block", re.findall(r"```toml\n(.*?)```", Path("docs/sidecar.md").read_text(), re.DOTALL)
)
def test_what_the_page_shows_works(block: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    (tmp_path / "tls").mkdir()
    for path, name in zip(Authority(tmp_path).sign("server"), ("fullchain.pem", "key.pem"), strict=True):
        path.rename(tmp_path / "tls" / name)
    file.write_text(block if "[targets." in block else f'{block}[targets.a]\nurl = "http://a.example"\n')
    assert check(file, environ=None).startswith(f"{file}: OK")


def test_the_page_of_keys_names_every_key_where_it_belongs() -> None:
    page = Path("docs/sidecar-options.md").read_text()
    sections = dict(re.findall(r"^### `\[+([\w.]+)\]+`\n(.*?)(?=^### |\Z)", page, re.DOTALL | re.MULTILINE))

    def keys(table: type[BaseModel]) -> Iterator[str]:
        for name, field in table.model_fields.items():
            yield name
            for inner in _tables_in(field.annotation):
                if inner not in (TLS, QuotaOptions, TenantBudget):  # these have sections of their own
                    yield from keys(inner)

    for name, field in Config.model_fields.items():
        [table] = _tables_in(field.annotation)
        section = sections.get(name) or sections[f"{name}.NAME"]
        assert [key for key in keys(table) if f"`{key}`" not in section] == [], name
    assert [key for key in TLS.model_fields if f"`{key}`" not in sections["server.tls"]] == []
    defaults = {**Server().model_dump(), "host": None, "port": None}
    for key, default in defaults.items():
        if isinstance(default, int | float) and default is not True and default is not False:
            assert f"| `{key}` | `{default}` |" in page or f"| `{key}` | {default:,} |" in page


def _tables_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for inner in get_args(annotation) for table in _tables_in(inner)]


def test_the_schema_takes_what_the_parser_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = Config.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for file in EXAMPLES.glob("*.toml"):
        assert list(validator.iter_errors(tomllib.loads(file.read_text()))) == []
    for wrong in (
        TARGET + "wieght = 1\n",
        TARGET + "[server]\nport = -1\n",
        TARGET + "[server]\nworkers = 0\n",
        TARGET + '[server.tls]\ncertificate = "c.pem"\n',
        TARGET + '[canary.a]\nmodel = "m"\n',
        TARGET + '[canary.a]\nmodel = "m"\ncandidate = "n"\nsteps = [2.0]\n',
        TARGET + '[routing]\nbalancer = "best"\n',
    ):
        assert list(validator.iter_errors(tomllib.loads(wrong))), wrong
        with pytest.raises(ConfigError):
            parse(wrong)


def test_the_page_names_every_table() -> None:
    page = Path("docs/sidecar.md").read_text()
    for table in Config.model_fields:
        assert f"[{table}" in page
