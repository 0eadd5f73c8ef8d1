"""Keys stay on their side: a client's reaches no provider, a target's no client, and neither the log, however told."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import zlib
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.sidecar.hostile_upstream import EVENTS, GOOD, KEY, ONE, Upstream, hostile, whole
from tests.sidecar.raw import BODY, Client, Served, chunk, get, post

pytestmark = pytest.mark.realtime

PLAIN, ODD = "key-of-acme-0123456789-ABC", "key/of+acme=0123456789~ABC=="
TARGETS = "key/of+the=sidecar-0123456789"
MORE = f"""
passthrough = true
[tenants.acme]
key_sha256 = "{hashlib.sha256(PLAIN.encode()).hexdigest()}"
[tenants.odd]
key_sha256 = "{hashlib.sha256(ODD.encode()).hexdigest()}"
"""
Sidecar = tuple[Served, Upstream]


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with hostile(MORE) as served:
        yield served


@pytest.fixture(scope="module")
def odd() -> Iterator[Sidecar]:
    """Serve one whose target has a key that is spelled in several ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODD_KEY", TARGETS)
        with hostile(
            'passthrough = true\n[targets.odd]\nurl = "http://localhost"\napi_key_env = "ODD_KEY"'
        ) as served:
            yield served


def spellings(key: str) -> dict[str, str]:
    """Give a key as others may write it."""
    escaped = "".join(f"\\u{ord(one):04x}" for one in key)
    return {
        "plain": key,
        "URL": quote(key, safe=""),
        "URL, lower case": "".join(f"%{ord(one):02x}" for one in key),
        "URL in URL": quote(quote(key, safe=""), safe="").replace("-", "%252d"),
        "JSON": json.dumps(key)[1:-1].replace("/", r"\/"),
        "JSON, escaped": escaped,
        "JSON in JSON": json.dumps(escaped)[1:-1],
        "HTML": html.escape(key).replace("/", "&#x2F;").replace("=", "&#61;"),
        "HTML, escaped": "".join(f"&#{ord(one)};" for one in key),
        "escaped in places": key.replace("y", "%79").replace("0", r"\u0030").replace("6", "&#54;"),
    }


def forms(key: str) -> list[bytes]:
    """Give what nothing that leaves may have in it."""
    encoded = [base64.b64encode(b"x" * at + key.encode())[4:-4] for at in range(3)]
    return [*(one.encode() for one in spellings(key).values()), *encoded]


HEADERS = {
    name: f"{name}: {value}"
    for name, value in {
        "x-custom": "<{key}>",
        "user-agent": "mine/1.0 ({key})",
        "idempotency-key": "{key}",
        "tracestate": "vendor={key}",
        "cookie": "session={key}",
        "openai-organization": "{key}",
        "anthropic-beta": "a,{key}",
        "accept": "application/json;key={key}",
        "x-api-key": "{key}",
        "x-goog-api-key": "{key}",
        "x-request-id": "{key}",
        "x-forwarded-authorization": "Bearer {key}",
        "proxy-authorization": "Basic {basic}",
        "x-original-authorization": "Basic {basic}",
        "x-auth": "basic  {basic}",
        "x-authorization": "BASIC {basic}",
        "baggage": "key={key}",
        "{key}": "1",
    }.items()
}


@pytest.mark.parametrize("key", [PLAIN, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("name", HEADERS)
def test_a_clients_key_in_a_header_reaches_no_provider_and_no_log(
    name: str, key: str, sidecar: Sidecar
) -> None:
    served, upstream = sidecar
    upstream.reply = whole()
    for spelled in {"plain": key} if name in ("x-api-key", "x-goog-api-key") else spellings(key):
        written = spellings(key)[spelled]
        if "{key}" in name and set(written) - set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"
        ):
            continue  # no name of a header
        basic = base64.b64encode(f"user:{key}".encode()).decode()
        header = HEADERS[name].replace("{key}", written).replace("{basic}", basic).encode()
        own = [
            b"authorization: Bearer " + key.encode(),
            b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01",
        ]
        for request in (
            post(BODY, *own, header, b"x-other: 1"),
            get(b"/main/v1/files", *own, header, b"x-other: 1"),
        ):
            upstream.asked.clear()
            served.log.lines.clear()
            answer = served.ask(request)
            assert answer.status == 200, answer
            [sent] = upstream.asked
            served.entries(1)
            assert b"x-other: 1" in sent
            for form in [*forms(key), key.lower().encode()]:
                assert form not in sent, (spelled, sent)
                assert form.decode() not in "\n".join(served.log.lines)


@pytest.mark.parametrize(
    "headers",
    [
        [b"x-a: 1", b"x-a: %b", b"x-a: 2"],
        [b"x-a: %b", b"x-b: %b"],
        [b"authorization: Basic dTpw", b"x-b: a%b"],
        [b"x-api-key: %b", b"x-b: %bb"],
        [b"cookie: a=%%20", b"x-b: %b"],
    ],
)
def test_a_clients_key_in_one_of_several_headers_reaches_no_provider(
    headers: list[bytes], sidecar: Sidecar
) -> None:
    served, upstream = sidecar
    upstream.reply = whole()
    upstream.asked.clear()
    told = [header.replace(b"%b", PLAIN.encode()) for header in headers]
    answer = served.ask(post(BODY, b"authorization: Bearer " + PLAIN.encode(), *told, b"x-other: a%20b&c"))
    assert answer.status == 200
    [sent] = upstream.asked
    assert PLAIN.encode() not in sent
    assert b"x-other: a%20b&c" in sent
    for header in (b"x-a: 1", b"x-a: 2"):
        assert sent.count(header) == told.count(header)


@pytest.mark.parametrize("key", [PLAIN, ODD], ids=["plain", "odd"])
def test_a_clients_key_in_a_url_reaches_no_provider_and_no_log(key: str, sidecar: Sidecar) -> None:
    served, upstream = sidecar
    upstream.reply = whole()
    for spelled in ("plain", "URL", "URL, lower case"):
        written = spellings(key)[spelled].encode()
        for path, status in (
            (b"/main/v1/files?a=1&next=%b" % written, 200),
            (b"/main/v1/files?%b=1&a=1" % written, 200),
            (b"/main/v1/files/%b" % written, 400),
            (b"/main/v1/files/of-%b" % written, 400),
            (b"/v1/models/%b" % written, 400),
        ):
            upstream.asked.clear()
            served.log.lines.clear()
            answer = served.ask(get(path, b"authorization: Bearer " + key.encode()))
            assert answer.status == status, (path, answer)
            served.entries(1)
            said = b"".join([*upstream.asked, answer.body, *(line.encode() for line in served.log.lines)])
            assert not [form for form in forms(key) if form in said], said
            assert status != 200 or b"?a=1 HTTP/1.1" in said


def test_what_looks_like_no_key_goes_on_as_it_came(sidecar: Sidecar) -> None:
    served, upstream = sidecar
    upstream.reply = whole()
    headers = [b"x-a: a%2Fb&c\\d", b"x-b: Basic dXNlcjpwYXNz", b"idempotency-key: " + PLAIN[:-1].encode()]
    upstream.asked.clear()
    answer = served.ask(get(b"/main/v1/files?a=%2F", b"authorization: Bearer " + PLAIN.encode(), *headers))
    assert answer.status == 200
    for header in headers:
        assert header in upstream.asked[0]
    assert b"GET /v1/files?a=%2F HTTP/1.1\r\n" in upstream.asked[0]


@pytest.mark.parametrize("path", [b"/files", b"/files?", b"/files/?", b"/files??", b"/files?a", b"/files?&"])
def test_a_path_goes_on_as_it_came_with_an_empty_query_too(path: bytes, sidecar: Sidecar) -> None:
    served, upstream = sidecar
    upstream.reply = whole()
    upstream.asked.clear()
    answer = served.ask(get(b"/main/v1" + path, b"authorization: Bearer " + PLAIN.encode()))
    assert answer.status == 200
    assert upstream.asked[0].startswith(b"GET /v1" + path + b" HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (b"/chat/completions", "has to end in /v1"),
        (b"/models", "has to end in /v1"),
        (b"/embeddings", "has to end in /v1"),
        (b"/v1/v1/messages", "must not end in /v1"),
        (b"/nothing", "There is nothing here."),
    ],
)
def test_a_base_url_that_is_wrong_is_told(path: bytes, said: str, sidecar: Sidecar) -> None:
    served, _ = sidecar
    request = post(BODY, b"authorization: Bearer " + PLAIN.encode())
    answer = served.ask(request.replace(b"/v1/chat/completions", path))
    assert answer.status == 404
    assert said in answer.json["error"]["message"]


def all_of(served: Served, request: bytes) -> bytes:
    """Give every byte that comes back."""
    with Client(served.url) as client:
        client.send(request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        return client.rest()


STATUSES = [b"200 OK", b"302 Found", b"400 Bad", b"401 No", b"404 No", b"429 Many", b"500 Broken"]
ASKED = [post(), post(BODY[:-1] + b',"stream":true}'), get(b"/main/v1/files")]


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("place", ["reason", "early", "value", "name", "location", "trailer", "extension"])
def test_a_targets_key_in_the_frame_of_a_reply_reaches_no_client(
    place: str, status: bytes, sidecar: Sidecar
) -> None:
    del sidecar
    key = KEY.encode()
    with hostile("passthrough = true") as (served, upstream):
        for request in ASKED:
            upstream.reply = {
                "reason": whole(GOOD, status + b" " + key),
                "early": b"HTTP/1.1 103 Early\r\nlink: <" + key + b">\r\n\r\n" + whole(GOOD, status),
                "value": whole(GOOD, status, b"x-told: " + base64.b64encode(b"k=" + key), b"x-also: " + key)
                if not status.startswith(b"2")
                else whole(GOOD, status, b"x-also: " + key),
                "name": whole(GOOD, status, key + b": 1", b"x-" + key.upper() + b": 1"),
                "location": whole(GOOD, status, b"location: http://a/?" + quote(KEY).encode()),
                "trailer": EVENTS.replace(b"200 OK", status)
                + chunk(GOOD)
                + b"0\r\nx-told: "
                + key
                + b"\r\n\r\n",
                "extension": EVENTS.replace(b"200 OK", status) + chunk(GOOD, b";told=" + key) + chunk(b""),
            }[place]
            got = all_of(served, request)
            assert got.startswith(b"HTTP/1.1 ")
            for form in forms(KEY):
                assert form.lower() not in got.lower(), got
                assert form.decode() not in "\n".join(served.log.lines)


@pytest.mark.parametrize("status", STATUSES[1:])
def test_a_targets_key_in_an_error_reaches_no_client_however_it_is_spelled(
    status: bytes, odd: Sidecar
) -> None:
    served, upstream = odd
    told = {
        spelled: f'{{"error": {{"message": "bad: {one}"}}}}' for spelled, one in spellings(TARGETS).items()
    }
    told["base64"] = base64.b64encode(b'{"k": "' + TARGETS.encode() + b'"}').decode()
    told["base64 for URLs"] = base64.urlsafe_b64encode(b"?" + TARGETS.encode()).decode()
    told["multipart"] = f'--b\r\ncontent-disposition: form-data; name="k"\r\n\r\n{TARGETS}\r\n--b--\r\n'
    told["HTML"] = f"<pre>{html.escape(TARGETS)}</pre>"
    for spelled, text in told.items():
        for body, *headers in (
            [text.encode()],
            [gzip.compress(text.encode()), b"content-encoding: gzip"],
            [zlib.compress(text.encode()), b"content-encoding: deflate"],
        ):
            for request in ASKED:
                upstream.reply = whole(body, status, *headers)
                got = all_of(served, request)
                for form in forms(TARGETS):
                    assert form not in got, (spelled, got)
                    assert form.decode() not in "\n".join(served.log.lines)


def test_a_targets_key_in_a_stream_reaches_no_client_wherever_it_is_cut(sidecar: Sidecar) -> None:
    del sidecar
    told = [
        b": %b\n\n",
        b"id: %b\n" + ONE,
        b'data: {"detail": "%b"}\n\n',
        b'data: {"error": {"message": "%b"}}\n\n',
    ]
    with hostile("passthrough = true") as (served, upstream):
        for one in told:
            text = one.replace(b"%b", KEY.encode())
            start = text.index(KEY.encode())
            for at in range(start, start + len(KEY) + 1, 5):
                upstream.reply = EVENTS + b"".join(map(chunk, (ONE, text[:at], text[at:], ONE, b"")))
                for request in (ASKED[1], ASKED[1].replace(b" /v1", b" /main/v1")):
                    got = all_of(served, request)
                    assert got.startswith(b"HTTP/1.1 200")
                    assert KEY.encode()[:8] not in got.replace(b"\r\n", b"")
                    assert b'"content":"hi"' in got
