"""Errors of providers lose the sidecar's keys, however they are encoded, and are otherwise what they were."""

from __future__ import annotations

import base64
import gzip
import html
import json
import random
import time
import zlib
from collections.abc import Callable
from urllib.parse import quote

import pytest

from resilient_llm.message import Headers
from resilient_llm.providers.content import decode_body
from resilient_llm.sidecar.masked import Secrets, without_secrets
from resilient_llm.streams import BufferedStream

pytestmark = pytest.mark.anyio

KEY = b"sk-of-the-sidecar-0123456789"
SECRETS = Secrets([KEY.decode()])
TOLD = b'{"error": {"message": "Incorrect API key: ' + KEY + b'"}}'
HARMLESS = b'{"error": {"message": "The model does not exist."}}'
JSON = (b"content-type", b"application/json")


def brotli(body: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("brotli").compress(body)
    return compressed


def zstd(body: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").compress(body)
    return compressed


ENCODINGS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"br": brotli,
    b"zstd": zstd,
    b"gzip, br": lambda body: brotli(gzip.compress(body)),
}


async def masked(body: bytes, *headers: tuple[bytes, bytes], secrets: Secrets = SECRETS) -> Reply:
    stream, after = await without_secrets(
        BufferedStream([body[:10], body[10:]]), [*headers, (b"content-length", b"%d" % len(body))], secrets
    )
    return b"".join([chunk async for chunk in stream]), after


Reply = tuple[bytes, Headers]


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_key_in_a_compressed_error_is_masked(encoding: bytes) -> None:
    body, headers = await masked(
        ENCODINGS[encoding](TOLD), JSON, (b"content-encoding", encoding), (b"etag", b"x")
    )
    assert body == TOLD.replace(KEY, b"***")
    assert headers == [JSON, (b"content-length", b"%d" % len(body))]


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_compressed_error_without_a_key_has_its_bytes(encoding: bytes) -> None:
    sent = ENCODINGS[encoding](HARMLESS)
    body, headers = await masked(sent, JSON, (b"content-encoding", encoding), (b"etag", b"x"))
    assert body == sent
    assert decode_body(headers, body) == HARMLESS
    assert (b"etag", b"x") in headers


async def test_a_key_in_a_plain_error_is_masked() -> None:
    body, headers = await masked(TOLD, JSON)
    assert body == TOLD.replace(KEY, b"***")
    assert headers == [JSON, (b"content-length", b"%d" % len(body))]


@pytest.mark.parametrize(
    "spelled",
    [
        b"a/key+of==ours",
        b"a%2Fkey%2Bof%3D%3Dours",
        b"a%2fkey%2bof%3d%3dours",
        b"a/key%2Bof%3D%3Dours",
        b"a/key%2bof==ours",
        rb"a\/key+of==ours",
        rb"a/key\u002Bof==ours",
        rb"a\u002fkey\u002bof\u003d\u003dours",
    ],
    ids=["plain", "URL", "lower case", "path", "query", "JSON", "escaped", "escaped, lower case"],
)
async def test_a_key_is_found_however_it_is_spelled(spelled: bytes) -> None:
    secrets = Secrets(["a/key+of==ours"])
    assert secrets.are_in(b"<" + spelled + b">")
    body, _ = await masked(b"<" + spelled + b">", secrets=secrets)
    assert body == b"<***>"
    assert not secrets.are_in(b"a/key+of=ours")


@pytest.mark.parametrize(
    "key", ['a"key\\of-ours', "a-k\u00e9y-\U0001f511-of-ours"], ids=["quoted", "not ASCII"]
)
def test_a_key_of_other_characters_is_found_in_json_and_urls(key: str) -> None:
    secrets = Secrets([key])
    for spelled in (key, json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1], quote(key)):
        assert secrets.are_in(spelled.encode())
        assert secrets.masked(b"<" + spelled.encode() + b">") == b"<***>"


async def test_a_key_that_begins_with_another_is_masked_whole() -> None:
    body, _ = await masked(
        b"one-key-of-ours and one-key-of-ours-too",
        secrets=Secrets(["one-key-of-ours", "one-key-of-ours-too"]),
    )
    assert body == b"*** and ***"


@pytest.mark.parametrize(
    ("sent", "encoding"),
    [
        (b"\x00" + TOLD, b"snappy"),
        (TOLD, b"gzip"),
        (gzip.compress(TOLD), b"gzip, gzip"),
        (gzip.compress(b" " * (4 << 20) + TOLD), b"gzip"),
        (TOLD + b" " * (4 << 20), b"identity"),
    ],
    ids=["unknown", "not what it says", "not as often as it says", "decoded too large", "too large"],
)
async def test_what_cannot_be_searched_is_left_out(sent: bytes, encoding: bytes) -> None:
    body, headers = await masked(sent, JSON, (b"content-encoding", encoding))
    assert body == b""
    assert headers == [JSON, (b"content-length", b"0")]


async def test_a_key_behind_the_end_of_what_is_compressed_is_not_passed_on() -> None:
    body, _ = await masked(gzip.compress(HARMLESS) + TOLD, (b"content-encoding", b"gzip"))
    assert body == HARMLESS


async def test_without_keys_there_is_nothing_to_leave_out() -> None:
    sent = b"\x00" + TOLD
    body, headers = await masked(sent, (b"content-encoding", b"snappy"), secrets=Secrets())
    assert body == sent
    assert (b"content-encoding", b"snappy") in headers


@pytest.mark.parametrize(
    "filling",
    [
        b"\\", b"%25", b"%2525", b"%", b"&amp;", b"&amp;amp;", b"&#0", b"&#", b"&#x0", b"\\u", b"\\u0041",
        b"&" + b"a" * 40,
    ],
)  # fmt: skip
def test_the_time_it_takes_is_linear_whatever_is_written(filling: bytes) -> None:
    """Doubled, what is searched takes twice the time: sixteen times as much takes far less than sixteen squared."""
    secrets = Secrets([KEY])
    told = KEY.replace(b"-", b"%2D", 1) + b" "

    def took(size: int) -> float:
        text = told + filling * (size // len(filling))
        before = time.process_time()
        assert secrets.masked(text).startswith(b"*** ")
        return time.process_time() - before

    took(1 << 12)
    assert took(1 << 16) < 80 * min(took(1 << 12) for _ in range(3)) + 0.1


@pytest.mark.parametrize(
    "number", [b"&#%b;" % (b"9" * 5000), b"&#x%b;" % (b"f" * 5000), b"&#%b65" % (b"0" * 5000)]
)
def test_a_number_without_end_is_no_character(number: bytes) -> None:
    secrets = Secrets([KEY])
    assert not secrets.are_in(number)
    assert secrets.masked(number + KEY) == number + b"***"
    assert secrets.masked(number + KEY.replace(b"s", b"&#%b;" % (b"0" * 5000 + b"115"))) == number + b"***"


@pytest.mark.parametrize(
    ("spelled", "shown"),
    [
        (rb'{"a": "\"sk\u002dof-the-sidecar-0123456789\""}', rb'{"a": "\"***\""}'),
        (rb"\nsk%2Dof-the-sidecar-0123456789\n%20", rb"\n***\n%20"),
        (rb"%20sk%2Dof-the-sidecar-0123456789%20", rb"%20***%20"),
        (rb"\u4f60sk&#45;of-the-sidecar-0123456789\u597d", rb"\u4f60***\u597d"),
        (rb"\\u0073k-of-the-sidecar-012345678\\u0039&lt;", rb"***&lt;"),
        (rb"%2573k-of-the-sidecar-0123456789 100%", rb"*** 100%"),
        (rb"sk%2Dof-the-sidecar-0123456789sk%2Dof-the-sidecar-0123456789", rb"******"),
        (rb"sk%26%2345%3Bof-the-sidecar-0123456789, C:\dir", rb"***, C:\dir"),
    ],
)
def test_nothing_but_the_key_is_masked(spelled: bytes, shown: bytes) -> None:
    assert SECRETS.masked(b"<" + spelled + b">") == b"<" + shown + b">"


def test_a_key_is_found_in_any_spelling_of_any_spelling() -> None:
    ways: list[Callable[[str], str]] = [
        quote,
        lambda text: quote(text, safe=""),
        lambda text: json.dumps(text)[1:-1],
        lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
        lambda text: text.replace("/", r"\/"),
        html.escape,
        lambda text: "".join(f"&#{ord(one)};" for one in text),
        lambda text: "".join(f"%{one:02x}" for one in text.encode()),
    ]
    choice = random.Random(7)
    secrets = Secrets([KEY, 'a/key+of==ours&"q\\\u00e9\U0001f511'])
    for _ in range(2000):
        told = choice.choice([KEY.decode(), 'a/key+of==ours&"q\\\u00e9\U0001f511'])
        for _ in range(choice.randrange(1, 4)):
            told = choice.choice(ways)(told)
        beside = "".join(choice.choices(' "ab{}<>\\&%;/\u00e9\u4f60', k=6))
        text = f"{beside} {told} {beside}".encode()
        assert secrets.masked(text) == f"{beside} *** {beside}".encode()


@pytest.mark.parametrize(
    "escape", [str, lambda one: quote(one, safe=""), lambda one: one.replace("/", r"\/")]
)
def test_base64_of_a_key_is_masked_however_it_is_escaped(escape: Callable[[str], str]) -> None:
    key = "3co3/1>a???20?b2/b"
    secrets = Secrets([key])
    for before in (b"", b"u", b"us"):
        written = base64.b64encode(before + key.encode() + b"!!!").decode()
        assert "/" in written
        masked = secrets.masked(f"<{escape(written)}>".encode())
        assert b"***" in masked
        assert len(masked) < 20
