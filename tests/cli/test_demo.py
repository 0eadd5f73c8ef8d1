"""`resilient-llm demo` as a process: what it prints, what it sends, and how it stops."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from resilient_llm.demo.scenario import TENANTS
from tests.cli.conftest import Start, read_until, stop
from tests.otlp import Receiver

pytestmark = pytest.mark.realtime

SHORT = ["--duration", "2"]
SECONDS = (2, 6, 18)
"""How long a run lasts: longer again where the machine was too slow to show in time what is to be shown."""


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the end of a run, and return what it printed and what it complained of."""
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == (1 if stderr else 0), stdout + stderr
    return stdout, stderr


def test_a_run_shows_what_it_is_there_to_show(start: Start) -> None:
    for seconds in SECONDS:
        with Receiver() as collector:
            options = ["--duration", str(seconds), "--json", "--otlp", collector.url]
            printed, complaint = finish(start("demo", *options))
            spans = list(collector.spans)
            metrics = collector.points.names()
        if not complaint:
            break
    assert complaint == "", printed + complaint
    *lines, last = printed.splitlines()
    printed, figures = "\n".join(lines), json.loads(last)

    tenants = figures["tenants"]
    assert {name: row["calls"] for name, row in tenants.items()} == {
        tenant.name: seconds * tenant.rate for tenant in TENANTS
    }
    for row in tenants.values():
        assert row["calls"] == row["ok"] + row["rejected"] + row["failed"]
    for name in ("amber", "birch", "cedar"):
        assert tenants[name]["ok"] == tenants[name]["calls"]
    assert figures["circuit"][0] == "open"
    assert figures["circuit"][-1] == "closed"

    # The table, the story and the figures say the same.
    (row,) = re.findall(r"^noisy +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) ", printed, re.MULTILINE)
    assert [int(cell) for cell in row] == [
        tenants["noisy"][name] for name in ("calls", "ok", "rejected", "failed", "retries")
    ]
    assert "noisy made 50 times the calls of a quiet tenant." in printed
    assert f"{6 * seconds} of {6 * seconds} calls served" in printed
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80

    # So does the collector, which also has the trace that was drawn.
    (trace_id,) = re.findall(r"^One call's trace, ([0-9a-f]{32})$", printed, re.MULTILINE)
    assert re.search(r"^POST /chat +\S+ m?s +━+ +✓ 200 tenant=\w+ *$", printed, re.MULTILINE)
    drawn = [span for span in spans if span.trace_id == trace_id]
    assert sum(span.name == "POST /chat" for span in drawn) == 1
    assert len(drawn) == len(re.findall(r"^(?:POST|[│ ]*[├└]) ", printed, re.MULTILINE))
    assert sum(span.name == "POST /chat" for span in spans) == sum(row["calls"] for row in tenants.values())
    for name, row in tenants.items():
        calls = [span for span in spans if span.attributes.get("resilient_llm.tenant") == name]
        retries = [span.attributes.get("resilient_llm.retries") for span in calls]
        assert sum(number for number in retries if isinstance(number, int)) == row["retries"]
        waited = {span.parent_id: span.seconds for span in spans if span.name == "wait bulkhead"}
        served = [span for span in calls if span.attributes.get("http.response.status_code") == 200]
        waits = sorted(waited.get(span.span_id, 0.0) for span in served if span.kind == "SERVER")
        assert len(waits) == row["ok"]
        assert waits[math.ceil(0.99 * len(waits)) - 1] == row["wait_p99"]
    assert f"{len(spans)} spans, and metrics, were sent to {collector.url}" in printed
    assert "resilient_llm.rejections" in metrics


def serving_on_a_port_of_its_own(start: Start) -> tuple[subprocess.Popen[str], int]:
    """Start a demo that stays up on a port that was free; somebody else may take it before."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        demo = start("demo", *SHORT, "--serve", "--port", str(port))
        assert demo.stderr is not None
        if demo.stdout is not None and demo.stdout.readline():
            return demo, port
        assert "Address already in use" in demo.stderr.read()


def test_serve_stays_up_until_interrupted(start: Start) -> None:
    demo, port = serving_on_a_port_of_its_own(start)
    read_until(demo, "Serving until Ctrl-C")
    app, provider = read_until(demo, "app").split()[1], read_until(demo, "provider").split()[1]
    assert app == f"http://127.0.0.1:{port}"
    assert f"curl {app}/chat -H 'x-tenant: amber'" in read_until(demo, "curl")
    reply = httpx.post(
        f"{app}/chat", json={"message": "Hello"}, headers={"x-tenant": "amber"}, trust_env=False, timeout=60
    )
    assert reply.status_code == 200
    assert reply.json()["text"].startswith("Whatever you say")
    assert (
        httpx.post(f"{app}/chat", json={"message": "Hello"}, trust_env=False, timeout=60).status_code == 401
    )
    assert httpx.get(f"{provider}/models", trust_env=False, timeout=60).is_success
    assert stop(demo)[1].strip() == ""
    assert demo.returncode == 130
    for url in (app, provider):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, trust_env=False, timeout=60)


def test_interrupted_in_the_middle_of_a_run(start: Start) -> None:
    demo = start("demo", "--duration", "600")
    read_until(demo, "noisy")
    time.sleep(1)  # calls are in flight, queued and being retried by now
    printed, complaint = stop(demo)
    assert complaint.strip() == ""
    assert "calls" not in printed.replace("calls a second", "")
    assert demo.returncode == 130


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_live_figures_on_a_terminal_leave_it_as_it_was(start: Start) -> None:
    parent, child = os.openpty()
    demo = start("demo", "--duration", "600", stdout=child)
    os.close(child)
    screen = b""
    while screen.count(b"s of 600 s") < 3:  # a few frames
        screen += os.read(parent, 65536)
    for text in (b"circuit of demo-large: ", b"active", b"\x1b[?25l"):
        assert text in screen
    demo.send_signal(signal.SIGINT)
    try:
        while block := os.read(parent, 65536):
            screen += block
    except OSError:  # what Linux says at the end of a pseudo-terminal
        pass
    os.close(parent)
    assert demo.wait(100) == 130
    assert screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l")  # the cursor is back


def test_nobody_listens_at_the_collectors_port(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    demo = start("demo", "--otlp", url)
    stdout, stderr = demo.communicate(timeout=100)
    assert demo.returncode == 1
    assert stdout == ""
    assert re.fullmatch(rf"Error: no collector takes OTLP/HTTP traces at {url}: .*refused.*\n", stderr)
