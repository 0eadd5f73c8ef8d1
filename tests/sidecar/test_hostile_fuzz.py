"""Bytes that nobody thought of: every response is one, none is a 5xx, and the sidecar goes on."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sidecar.hostile_inputs import REFUSED, TAKEN
from tests.sidecar.raw import Client, Served, chunk, served

pytestmark = pytest.mark.realtime

PIECES = [
    b"POST ", b"GET ", b"/v1/chat/completions", b"/v1/models", b"/main/", b" HTTP/1.1", b" HTTP/1.0",
    b"host: x", b"content-length: ", b"transfer-encoding: chunked", b"connection: close", b"connection: upgrade",
    b"expect: 100-continue", b"content-encoding: gzip", b"upgrade: h2c", b"5", b"0", b"-1", b"ffffffff",
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b": ", b" ", b"\t", b"\0", b"\xff", b"%", b"..", b";",
    b"{", b"}", b'"model"', b":", b'"m"', b"[", b",", chunk(b"{}"), b"0\r\n\r\n",
]  # fmt: skip
SAMPLES = [sent for sent in (*REFUSED.values(), *TAKEN.values()) if len(sent) < 2000]
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Served]:
    with served("[server]\nbody_timeout = 0.5\n", head_timeout=0.5) as running:
        yield running


def check(sidecar: Served, *sent: bytes) -> None:
    """Send parts, end, and read every response there is."""
    with Client(sidecar.url) as client:
        for part in sent:
            client.send(part)
        with suppress(OSError):
            client.socket.shutdown(socket.SHUT_WR)
        with suppress(http.client.RemoteDisconnected, ConnectionResetError, http.client.IncompleteRead):
            while True:
                answer = client.answer("GET" if sent[0].startswith(b"GET") else "POST")
                assert 100 <= answer.status < 500, answer
    sidecar.works()
    assert not [line for line in sidecar.log.lines if '"level": "error"' in line]
    sidecar.log.lines.clear()


@FEW
@given(pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=8), max_size=30))
def test_pieces_in_any_order(pieces: list[bytes], sidecar: Served) -> None:
    check(sidecar, b"".join(pieces))


@FEW
@given(data=st.data(), sample=st.sampled_from(SAMPLES))
def test_a_request_with_something_changed(data: st.DataObject, sample: bytes, sidecar: Served) -> None:
    changed = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        upto = at + data.draw(st.integers(0, 6))
        changed[at:upto] = data.draw(st.binary(max_size=4) | st.sampled_from(PIECES))
    check(sidecar, bytes(changed))


@FEW
@given(
    cuts=st.lists(st.integers(0, 2000), max_size=6),
    samples=st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=3),
)
def test_requests_in_pieces_and_behind_each_other(
    cuts: list[int], samples: list[bytes], sidecar: Served
) -> None:
    sent = b"".join(samples)
    ends = sorted({min(cut, len(sent)) for cut in cuts} | {len(sent)})
    check(sidecar, *(sent[start:end] for start, end in zip([0, *ends], ends, strict=False)))
