"""The comparison of the gateways runs, looks at every reply, and leaves out whom it cannot have."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks._gateway_process import Gateway
from benchmarks._gateways import GATEWAYS
from benchmarks._sidecar_load import Asking, offer
from benchmarks.sidecar import compare, summary

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.realtime,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]


def nowhere() -> None:
    raise FileNotFoundError("no such package")


async def test_the_sidecar_is_measured_and_who_cannot_be_had_is_left_out() -> None:
    gateways = {
        "sidecar": GATEWAYS["sidecar"],
        "smg": Gateway(command=GATEWAYS["smg"].command, get=nowhere),
    }
    figures = await compare(gateways, workers=1, rounds=1, seconds=0.4)
    assert figures.keys() == {"direct", "sidecar"}
    assert all(value > 0 for name, value in figures["sidecar"].items() if not name.startswith("us_per"))
    said = summary(figures)
    assert said["smg_rps"] is None
    assert said["smg_added_p50_ms"] is None
    assert said["sidecar_rps"] == float(f"{figures['sidecar']['rps']:.4g}")
    assert {f"{name}_rps" for name in GATEWAYS} <= said.keys()


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[int]:
    """Answer every request with the same bytes; gives the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "events", "why"),
    [
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", 0, "503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", 0, "short"),
        (CHUNKED + b"2\r\n{}\r\n0\r\n\r\n", 0, "short"),
        (CHUNKED + b"6\r\ndata:\n\r\n0\r\n\r\n", 1, "a stream of 0 events"),
    ],
)
async def test_a_reply_that_is_not_right_is_no_figure(reply: bytes, events: int, why: str) -> None:
    async with answering(reply) as port:
        with pytest.raises(RuntimeError, match=why):
            await offer(Asking(port=port, at_least=10, events=events), in_flight=1, seconds=0.2)
