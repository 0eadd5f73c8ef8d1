"""What is loaded when: all that a sidecar needs to answer is there before it says that it listens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.sidecar.process import PORTS

pytestmark = pytest.mark.realtime

# Serves a sidecar, asks it once, and prints what that has loaded which comes with no Python.
PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from resilient_llm.sidecar.event_loop import run as run_loop
from resilient_llm.sidecar.server import run

ANSWER = b'{"object": "chat.completion", "choices": [{"message": {"content": "Paris"}, "finish_reason": "stop"}]}'
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(ANSWER)
ASKED = b'{"model": "m", "messages": [{"role": "user", "content": "Which city?"}]}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n"
    b"content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(ASKED)
) + ASKED

async def provide(reader, writer):
    await reader.readuntil(b"Which city?")
    writer.write(HEAD + ANSWER)
    await writer.drain()

async def main():
    provider = await asyncio.start_server(provide, "127.0.0.1", 0)
    url = "http://127.0.0.1:%d/v1" % provider.sockets[0].getsockname()[1]
    file = Path(sys.argv[1])
    file.write_text(f'[server]\\nport = 0\\n[admin]\\nenabled = false\\n[targets.a]\\nurl = "{url}"\\n')
    listening = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(run(file, ready=lambda url, _: listening.set_result(url)))
    port = int((await listening).rpartition(":")[2])
    before = set(sys.modules)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    reply = await reader.read()
    writer.close()
    loaded = sorted(set(sys.modules) - before)
    print(reply[9:12].decode(), [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names])
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    provider.close()

run_loop(main())
"""


def test_the_first_call_loads_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "gateway.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("200 []\n", 0), done.stderr


@pytest.mark.parametrize(("closed", "workers"), [("<&-", 1), ("2>&-", 1), ("<&- 2>&-", 2)])
def test_standard_files_that_are_closed_are_taken_for_no_others(
    closed: str, workers: int, tmp_path: Path
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'{PORTS}[targets.a]\nurl = "http://127.0.0.1:9/v1"\n')
    command = f'exec "$0" -m resilient_llm.cli serve --config "$1" --workers {workers} {closed}'
    process = subprocess.Popen(
        ["sh", "-c", command, sys.executable, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        listening = next(line for line in process.stdout if '"listening"' in line)
        assert httpx.get(f"{json.loads(listening)['url']}/healthz").status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
