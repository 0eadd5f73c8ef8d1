"""Requests that are no HTTP, are meant to be read in two ways, or to cost more than they should.

Those of `REFUSED` get a 4xx. Those of `TAKEN` are odd and right: they are answered, and go on meaning one thing.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping

from tests.sidecar.raw import BODY, CHUNKED, LINE, chunk, get, post

LAST = b"0\r\n\r\n"
OLD = LINE.replace(b"1.1", b"1.0")
DEEP = 100_000


def _instead(part: bytes, other: bytes) -> bytes:
    assert part in post(), part
    return post().replace(part, other, 1)


_LENGTHS = {
    "length and chunked": LINE + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + LAST,
    "chunked and length": LINE + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n" + LAST,
    "two lengths": LINE + b"content-length: 27\r\ncontent-length: 5\r\n\r\n" + BODY,
    "a length twice": LINE + b"content-length: 27\r\ncontent-length: 27\r\n\r\n" + BODY,
    "a list of lengths": LINE + b"content-length: 27, 27\r\n\r\n" + BODY,
    "a negative length": LINE + b"content-length: -1\r\n\r\n",
    "a signed length": LINE + b"content-length: +27\r\n\r\n" + BODY,
    "a hexadecimal length": LINE + b"content-length: 0x1b\r\n\r\n" + BODY,
    "no length at all": LINE + b"content-length:\r\n\r\n" + BODY,
    "a body that is too large": LINE + b"content-length: 99999999999999999999999999\r\n\r\n",
    "a body that is a little too large": LINE + b"content-length: 1000001\r\n\r\n",
}

_CODINGS = {
    "an unknown transfer coding": LINE + b"transfer-encoding: xchunked\r\n\r\n" + LAST,
    "chunked, then another": LINE + b"transfer-encoding: chunked, identity\r\n\r\n" + LAST,
    "another, then chunked": LINE + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk(BODY) + LAST,
    "nothing, then chunked": LINE + b"transfer-encoding: ,chunked\r\n\r\n" + chunk(BODY) + LAST,
    "chunked twice": LINE + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n" + chunk(BODY) + LAST,
    "no transfer coding": LINE + b"transfer-encoding: identity\r\ncontent-length: 27\r\n\r\n" + BODY,
    "chunked with a tab": LINE + b"transfer-encoding:\x0bchunked\r\n\r\n" + LAST,
    "chunked in HTTP/1.0": OLD + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY) + LAST,
    "a name with a blank": LINE + b"transfer-encoding : chunked\r\n\r\n" + LAST,
}

_CHUNKS = {
    "a chunk of no size": CHUNKED + b"zz\r\n{}\r\n" + LAST,
    "a chunk of an empty size": CHUNKED + b"\r\n{}\r\n" + LAST,
    "a chunk of a negative size": CHUNKED + b"-1\r\n{}\r\n" + LAST,
    "a chunk of too large a size": CHUNKED + b"fffffffffffffffff\r\n{}\r\n" + LAST,
    "a chunk of a size in C": CHUNKED + b"0x1b\r\n" + BODY + b"\r\n" + LAST,
    "a chunk of a size in Python": CHUNKED + b"1_b\r\n" + BODY + b"\r\n" + LAST,
    "a chunk of a size and a blank": CHUNKED + b"1b \r\n" + BODY + b"\r\n" + LAST,
    "a chunk without its end": CHUNKED + b"2\r\n{}xx" + LAST,
    "a chunk of bare LF": CHUNKED + b"1b\n" + BODY + b"\n0\n\n",
    "an extension that ends in LF": CHUNKED + b"1b;a=b\n" + BODY + b"\r\n" + LAST,
    "an extension of two lines": CHUNKED + b'1b;a="\r\n"\r\n' + BODY + b"\r\n" + LAST,
    "an extension that does not end": CHUNKED + b"1b;" + b"a" * 300_000,
    "a trailer that is a length": CHUNKED + chunk(BODY) + b"0\r\ncontent-length: 3\r\n\r\n",
    "a trailer without a colon": CHUNKED + chunk(BODY) + b"0\r\nx\r\n\r\n",
    "a trailer that does not end": CHUNKED + chunk(BODY) + b"0\r\nx: " + b"y" * 300_000,
    "many trailers": CHUNKED + chunk(BODY) + b"0\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",
}

_LINES = {
    "bare LF": post().replace(b"\r\n", b"\n"),
    "one bare LF": _instead(b"localhost\r\n", b"localhost\n"),
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/1.2": _instead(b"HTTP/1.1", b"HTTP/1.2"),
    "HTTP/2.0": _instead(b"HTTP/1.1", b"HTTP/2.0"),
    "HTTP/2 by prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version of no digits": _instead(b"HTTP/1.1", b"HTTP/x.y"),
    "a version of another protocol": _instead(b"HTTP/1.1", b"ICE/1.0"),
    "a request line of three words too many": b"POST /v1/x y z HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a blank before the line": b" " + post(),
    "a tab in the line": _instead(b"POST ", b"POST\t"),
    "an unknown method": _instead(b"POST", b"BREW"),
    "a method in lower case": _instead(b"POST", b"post"),
    "a method of 100,000 letters": b"A" * 100_000 + b" / HTTP/1.1\r\n\r\n",
    "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "TRACE": b"TRACE /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a huge path": get(b"/" + b"a" * 300_000),
}

_HEADERS = {
    "no host": _instead(b"host: localhost\r\n", b""),
    "two hosts": _instead(b"host: localhost", b"host: localhost\r\nhost: y"),
    "a host that is a path": _instead(b"host: localhost", b"host: localhost/../y"),
    "a host with a user": _instead(b"host: localhost", b"host: user@x"),
    "folded headers": LINE + b"x-a: 1\r\n b\r\ncontent-length: 2\r\n\r\n{}",
    "a header without a colon": LINE + b"nonsense\r\ncontent-length: 2\r\n\r\n{}",
    "a header without a name": post(BODY, b": x"),
    "a header that begins with a blank": _instead(b"host:", b" host:"),
    "a name that is not ASCII": post(BODY, b"x-\xe9: y"),
    "a NUL in a header": post(BODY, b"x-a: \x00"),
    "a control character in a header": post(BODY, b"x-a: a\x01b"),
    "DEL in a header": post(BODY, b"x-a: \x7f"),
    "a bare CR in a header": post(BODY, b"x-a: 1\rx-b: 2"),
    "a header that is not UTF-8": post(BODY, b"x-a: \xff\xfe"),
    "many headers": LINE + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
    "one huge header": post(BODY, b"x-a: " + b"y" * 300_000),
    "a head of a little too much": post(BODY, b"x-a: " + b"y" * 66_000),
    "a header that never ends": LINE + b"x-a: " + b"y" * 300_000,
    "a deadline that is no number": post(BODY, b"x-request-timeout: soon"),
    "a deadline that is not a number": post(BODY, b"x-request-timeout: nan"),
    "a deadline without end": post(BODY, b"x-request-timeout: 1e999"),
    "a deadline that has passed": post(BODY, b"x-request-timeout: -1"),
}

_TARGETS = {
    "bytes above ASCII in the path": get(b"/v1/\xff\xfe"),
    "a NUL in the path": get(b"/v1/\x00"),
    "a path without a slash": get(b"v1/models"),
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "dots": get(b"/main/../../admin/config"),
    "encoded dots": get(b"/main/%2e%2e/admin"),
    "dots encoded twice": get(b"/main/%252e%252e/admin"),
    "dots in too many bytes": get(b"/main/%c0%ae%c0%ae/admin"),
    "dots with a parameter": get(b"/main/..;a=b/admin"),
    "encoded slashes": get(b"/main/a%2f%2e%2e%2fb"),
    "slashes encoded twice": get(b"/main/a%252fb"),
    "two slashes": get(b"//evil.example/v1/models"),
    "two slashes in a known path": _instead(b"/v1/", b"/v1//"),
    "a dot in a known path": _instead(b"/v1/", b"/v1/./"),
    "a slash behind a known path": _instead(b"completions", b"completions/"),
    "a blank behind a known path": _instead(b"completions", b"completions%20"),
    "a NUL behind a known path": _instead(b"completions", b"completions%00"),
    "a parameter behind a known path": _instead(b"completions", b"completions;v=1"),
    "a known path in upper case": _instead(b"/v1/", b"/V1/"),
    "an encoded target": get(b"/%6dain/v1/models"),
    "a target that is none": get(b"/other/v1/models"),
    "an empty segment with a parameter": get(b"/main/;a/admin"),
    "an encoded NUL": get(b"/main/%00"),
    "an encoded line break": get(b"/main/a%0d%0ax-a:%20b"),
    "an encoding that is none": get(b"/main/a%zz"),
    "a backslash": get(b"/main\\..\\x"),
    "an encoded backslash": get(b"/main/a%5cb"),
    "an address as target": get(b"/http:%2f%2fevil.example/"),
    "the admin listener's path": get(b"/admin/config"),
    "the metrics": get(b"/metrics"),
    "a query that is none": _instead(b"completions", b'completions?a="<>'),
    "a NUL in the query": _instead(b"completions", b"completions?a=\x00"),
}

_JSON = {
    "an empty body": post(b""),
    "invalid UTF-8": post(b'{"model":"\xff\xfe"}'),
    "an overlong NUL": post(b'{"model":"a\xc0\x80"}'),
    "a byte order mark": post(b"\xef\xbb\xbf" + BODY),
    "UTF-16": post(BODY.decode().encode("utf-16")),
    "UTF-16 without a mark": post(BODY.decode().encode("utf-16-le")),
    "UTF-16, big endian": post(BODY.decode().encode("utf-16-be")),
    "UTF-32": post(BODY.decode().encode("utf-32")),
    "something behind the JSON": post(BODY + b"x"),
    "JSON twice": post(BODY + BODY),
    "half of the JSON": post(BODY[:-5]),
    "an array": post(b"[1]"),
    "a string": post(b'"m"'),
    "null": post(b"null"),
    "a model that is a number": post(b'{"model":5}'),
    "a model that is a list": post(b'{"model":["m"]}'),
    "a model that is an object": post(b'{"model":{"a":1}}'),
    "a model that is null": post(b'{"model":null}'),
    "a model of nothing": post(b'{"model":""}'),
    "a model with half a surrogate pair": post(b'{"model":"m\\ud800","messages":[]}'),
    "a model of 100,000 letters": post(b'{"model":"' + b"m" * DEEP + b'","messages":[]}'),
    "a model of 100,000 letters for a target by its name": post(
        b'{"model":"' + b"m" * DEEP + b'","messages":[]}'
    ).replace(b"/v1", b"/main/v1", 1),
    "no model": post(b'{"messages":[]}'),
    "deep JSON": post(b"[" * DEEP * 2),
    "deep JSON inside": post(b'{"model":"m","messages":' + b"[" * DEEP),
    "deep JSON with an end": post(b'{"model":"m","messages":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "deep objects": post(b'{"model":"m","a":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"),
    "a number of 100,000 digits": post(b'{"model":"m","seed":' + b"9" * DEEP + b"}"),
}

_ENCODED = {
    "a gzip bomb": post(gzip.compress(b"0" * 200_000_000), b"content-encoding: gzip"),
    "a gzip bomb in gzip": post(gzip.compress(gzip.compress(b"0" * 10**8)), b"content-encoding: gzip, gzip"),
    "a deflate bomb": post(zlib.compress(b"0" * 10**8), b"content-encoding: deflate"),
    "gzip five times": post(BODY, b"content-encoding: " + b", ".join([b"gzip"] * 5)),
    "gzip that is none": post(BODY, b"content-encoding: gzip"),
    "gzip that breaks off": post(gzip.compress(BODY)[:12], b"content-encoding: gzip"),
    "zstd that is none": post(BODY, b"content-encoding: zstd"),
    "an unknown encoding": post(BODY, b"content-encoding: snappy"),
    "an encoding of many": post(BODY, b"content-encoding: " + b"identity," * 1000 + b"gzip"),
}

REFUSED: Mapping[str, bytes] = {
    **_LENGTHS, **_CODINGS, **_CHUNKS, **_LINES, **_HEADERS, **_TARGETS, **_JSON, **_ENCODED
}  # fmt: skip

TAKEN: Mapping[str, bytes] = {
    "HTTP/1.0": _instead(b"HTTP/1.1", b"HTTP/1.0"),
    "a target that is an address": _instead(b"/v1", b"http://evil.example/v1"),
    "a target that is an address with a user": _instead(b"/v1", b"http://user:secret@evil.example/v1"),
    "line breaks before the line": b"\r\n\r\n" + post(),
    "an address as host": _instead(b"host: localhost", b"host: [::1]:80"),
    "no host to name": _instead(b"host: localhost", b"host:"),
    "CHUNKED": LINE + b"transfer-encoding: CHUNKED\r\n\r\n" + chunk(BODY) + LAST,
    "chunks of a byte": CHUNKED + b"".join(chunk(BODY[n : n + 1]) for n in range(len(BODY))) + LAST,
    "an extension": CHUNKED + chunk(BODY, b';a="b;c"') + LAST,
    "a size with zeros": CHUNKED + b"0" * 20 + chunk(BODY) + LAST,
    "trailers": CHUNKED + chunk(BODY) + b"0\r\nx-trailer: 1\r\nauthorization: Bearer evil\r\n\r\n",
    "a name that looks like another's": post(BODY, b"transfer_encoding: chunked"),
    "headers named by connection": post(BODY, b"connection: x-a, content-length, content-type", b"x-a: 1"),
    "an upgrade": post(BODY, b"connection: upgrade", b"upgrade: websocket"),
    "an expectation that nobody has": post(BODY, b"expect: tea"),
    "an id that is none": post(BODY, b'x-request-id: a"b{}'),
    "a trace that is none": post(BODY, b"traceparent: 00-zz-yy-01", b"tracestate: " + b"a=b," * 3000),
    "gzip": post(gzip.compress(BODY), b"content-encoding: gzip"),
    "no encoding by name": post(BODY, b"content-encoding: identity"),
    "a model twice": post(b'{"model":"a","model":"m","messages":[]}'),
    "no numbers": post(b'{"model":"m","messages":[],"a":[NaN,-Infinity,1e400]}'),
    "half a surrogate pair": post(b'{"model":"m","messages":[{"content":"\\udfff"}]}'),
    "a NUL in JSON": post(b'{"model":"a\\u0000b","messages":[]}'),
    "a model of 256 letters": post(b'{"model":"' + b"m" * 256 + b'","messages":[]}'),
    "JSON that is a little deep": post(b'{"model":"m","messages":' + b"[" * 500 + b"]" * 500 + b"}"),
    "other types than anybody expects": post(
        b'{"model":"m","messages":{"role":5},"tools":7,"max_tokens":"x","stream":"yes","stream_options":3,"n":-1}'
    ),
}  # fmt: skip
