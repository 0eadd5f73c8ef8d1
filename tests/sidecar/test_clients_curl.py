"""curl sees through a sidecar what it sees without, and what it asks of HTTP is done."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from resilient_llm.testing import Fault
from tests.sidecar.support import ANSWER, ASK, KEY
from tests.sidecar.twins import Twins, twins

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.realtime,
    pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl"),
]

CHAT = "/v1/chat/completions"
BODY = json.dumps(ASK)
STREAM = json.dumps({**ASK, "stream": True})
OF_THE_WAY = frozenset({"connection", "date", "server", "transfer-encoding"})
OURS = "x-resilient-llm-"


class Said(NamedTuple):
    """What came back."""

    code: int
    """curl's own."""
    status: int
    headers: list[tuple[str, str]]
    """But for those that each server has of its own."""
    body: bytes
    trace: str
    """What curl says of the connection."""


def _curl(*options: str, key: str = KEY) -> Said:
    shown = [] if "--head" in options else ["--include"]
    shows = ["-H", f"authorization: Bearer {key}"]
    command = ["curl", "-sSv", *shown, "--noproxy", "*", "--max-time", "60", *shows]
    done = subprocess.run([*command, *options], capture_output=True, check=False)
    head, _, body = done.stdout.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    line, *rest = head.decode().split("\r\n")
    named = [(name.lower(), value) for name, _, value in (each.partition(": ") for each in rest)]
    kept = [each for each in named if each[0] not in OF_THE_WAY and not each[0].startswith(OURS)]
    return Said(done.returncode, int(line.split(" ")[1]), kept, body, done.stderr.decode())


async def curl(*options: str, key: str = KEY) -> Said:
    return await anyio.to_thread.run_sync(partial(_curl, *options, key=key))


def _curl_until(said: bytes, *options: str) -> bytes:
    """Have curl read until something is said, and end it in the middle; gives what it has read."""
    command = ["curl", "-sS", "-N", "--noproxy", "*", "--max-time", "60"]
    body = b""
    with subprocess.Popen(
        [*command, "-H", f"authorization: Bearer {KEY}", *options], stdout=subprocess.PIPE, bufsize=0
    ) as running:
        assert running.stdout is not None
        while said not in body and (more := running.stdout.read(65_536)):
            body += more
        running.kill()
    return body


async def same(ends: Twins, path: str, *options: str) -> Said:
    """Make a request of both, and give what came through the sidecar, which has to be the same."""
    direct = await curl(ends.direct + path, *options)
    proxied = await curl(ends.proxied + path, *options)
    assert proxied[:4] == direct[:4]
    return proxied


def json_body(body: str) -> list[str]:
    return ["-H", "content-type: application/json", "-d", body]


async def test_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        said = await same(ends, CHAT, *json_body(BODY))
    assert (said.code, said.status) == (0, 200)
    assert json.loads(said.body)["choices"][0]["message"]["content"] == ANSWER


async def test_a_stream_comes_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider says no more after three tokens, and curl has them all the same."""
    async with twins(monkeypatch) as ends:
        said = await same(ends, CHAT, "-N", *json_body(STREAM))
        assert said.body.endswith(b"data: [DONE]\n\n")
        ends.script([Fault(stall_after_tokens=3)])
        cut = await anyio.to_thread.run_sync(
            partial(_curl_until, b"brown", ends.proxied + CHAT, *json_body(STREAM))
        )
        assert b"brown" in cut
        assert b"[DONE]" not in cut
        assert (await ends.log.entry(2))["outcome"] == "cancelled"


@pytest.mark.parametrize("status", [400, 404, 429, 503])
async def test_errors(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        ends.script(lambda _request: Fault(status=status, message="no"))
        direct = await curl(ends.direct + CHAT, *json_body(BODY))
        proxied = await curl(ends.proxied + CHAT, *json_body(BODY))
        failed = await curl(ends.proxied + CHAT, "--fail", *json_body(BODY))
    assert (proxied.status, proxied.body) == (direct.status, direct.body)
    assert proxied.status == status
    assert failed.code == 22


async def test_a_head_has_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, '[models.fast]\ntargets = ["openai/gpt-4o"]\n') as ends:
        got = await curl(f"{ends.proxied}/v1/models")
        head = await curl(f"{ends.proxied}/v1/models", "--head")
    assert (head.code, head.status, head.headers, head.body) == (0, 200, got.headers, b"")


async def test_a_compressed_reply_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    body = gzip.compress(
        json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}).encode()
    )
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with twins(monkeypatch) as ends:
        ends.script(lambda _request: Fault(body=body, headers=headers))
        packed = await same(ends, CHAT, "-H", "accept-encoding: gzip", *json_body(BODY))
        unpacked = await same(ends, CHAT, "--compressed", *json_body(BODY))
        assert "gzip" in ends.providers[1].requests[-1].headers["accept-encoding"]
    assert packed.body == body
    assert json.loads(unpacked.body)["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("framing", [[], ["-H", "transfer-encoding: chunked"]], ids=["sized", "chunked"])
async def test_a_large_body_waits_to_be_asked_for(
    framing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = json.dumps({**ASK, "user": "x" * 3_000_000})
    file = tmp_path / "body.json"
    file.write_text(large)
    options = [
        "-H",
        "content-type: application/json",
        "-H",
        "expect: 100-continue",
        "--expect100-timeout",
        "30",
    ]
    async with twins(monkeypatch) as ends:
        said = await same(ends, CHAT, *options, *framing, "--data-binary", f"@{file}")
        assert said.status == 200
        assert "HTTP/1.1 100 Continue" in said.trace
        assert ends.providers[1].requests[-1].raw_body == large.encode()
        assert "expect" not in ends.providers[1].requests[-1].headers
        upload = [*options, *framing, "--data-binary", f"@{file}"]
        refused = await curl(ends.proxied + CHAT, *upload, key="nobodys")
        assert refused.status == 401
        assert "100 Continue" not in refused.trace  # not one byte of it was wanted
        assert ends.providers[1].total_requests == 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["in one piece", "as a stream"])
async def test_http_1_0(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        said = await curl(ends.proxied + CHAT, "--http1.0", *json_body(body))
    assert (said.code, said.status) == (0, 200)
    assert "transfer-encoding" not in said.trace.lower()
    assert said.body.startswith(b"data: " if body == STREAM else b"{")
    assert said.body.endswith(b"data: [DONE]\n\n" if body == STREAM else b"}")
