"""Errors of providers lose the sidecar's keys, however they are encoded, and are otherwise what they were."""

from __future__ import annotations

import gzip
import json
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
