"""More connections than there is room for: idle ones cost little, and where descriptors end it says so and goes on."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.process import PORTS, Process, started
from tests.sidecar.raw import LONG, Client, get, post

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads what Linux tells of a process"),
]

IDLE = 2000


@contextmanager
def running(folder: Path) -> Iterator[tuple[Process, str, int]]:
    """Start a sidecar; give it, its URL and its process's id."""
    file = folder / "gateway.toml"
    with serve_in_thread(FakeProvider(max_requests_kept=0)) as upstream:
        file.write_text(f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\n')
        with started(file) as (process, url, _admin):
            yield process, url, process.pid


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def megabytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def eventually(what: str, until: object) -> None:
    assert callable(until)
    end = time.monotonic() + LONG
    while not until():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_two_thousand_idle_connections(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, -1) and hard < IDLE + 500:
        pytest.skip(f"this process may open {hard} files")
    with ExitStack() as stack:
        wanted = IDLE + 500
        if soft < wanted:
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _, url, pid = stack.enter_context(running(tmp_path))
        assert httpx.post(f"{url}/v1/chat/completions", json={"model": "m"}).status_code == 200
        before, opened = megabytes(pid), descriptors(pid)
        clients = [stack.enter_context(Client(url)) for _ in range(IDLE)]
        for client in clients:
            client.send(get(b"/healthz"))
        assert {client.answer("GET").status for client in clients} == {200}
        assert descriptors(pid) >= IDLE
        assert (megabytes(pid) - before) / IDLE < 0.05  # some 50 kB each would be 100 MB
        for client in clients[::100]:
            client.send(post())
            assert client.answer().status == 200
        for client in clients:
            client.close()
        eventually("their descriptors are given back", lambda: descriptors(pid) <= opened + 5)


def test_clients_are_refused_before_descriptors_end(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    with serve_in_thread(FakeProvider(max_requests_kept=0)) as upstream, ExitStack() as stack:
        file.write_text(f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\n')
        process = Process(file)
        stack.callback(process.kill)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (100, 100))  # long before it looks
        url = process.wait_for("listening")["url"]
        clients = [stack.enter_context(Client(url)) for _ in range(26)]
        for client in clients:
            client.send(post())
            assert client.answer().status == 200
        with Client(url) as client:
            assert client.answer().status == 503
        assert process.wait_for("Service Unavailable, 26 connections are open")["level"] == "warning"
        clients[0].send(post())  # the others go on
        assert clients[0].answer().status == 200
        for client in clients:
            client.close()
        eventually("it serves again", lambda: serves(url))


def test_as_many_are_served_at_once_as_are_let_in(tmp_path: Path) -> None:
    """Each has a connection to the provider, and whoever operates the sidecar gets through."""
    file = tmp_path / "gateway.toml"
    slow = FakeProvider(max_requests_kept=0)
    slow.script(None, lambda _request: Fault(delay_headers=2.0))
    with serve_in_thread(slow) as upstream, ExitStack() as stack:
        file.write_text(f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\nconcurrency.enabled = false\n')
        process = Process(file)
        stack.callback(process.kill)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (100, 100))  # long before it looks
        listening = process.wait_for("listening")
        clients = [stack.enter_context(Client(listening["url"])) for _ in range(26)]
        for client in clients:
            client.send(post())
        for _ in range(50):  # who are refused, one after another, and do not leave
            refused = stack.enter_context(Client(listening["url"]))
            assert refused.answer().status == 503
        assert httpx.get(f"{listening['admin_url']}/healthz").status_code == 200
        assert {client.answer().status for client in clients} == {200}


def test_a_limit_of_connections_above_what_there_is_leaves_some_descriptors(tmp_path: Path) -> None:
    """They are refused, and who is there, or operates it, goes on."""
    file = tmp_path / "gateway.toml"
    with serve_in_thread(FakeProvider(max_requests_kept=0)) as upstream, ExitStack() as stack:
        ports = PORTS.replace("[server]", "[server]\nmax_connections = 1000")
        file.write_text(f'{ports}[targets.one]\nurl = "{upstream}/v1"\n')
        process = Process(file)
        stack.callback(process.kill)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (100, 100))  # long before it looks
        listening = process.wait_for("listening")
        clients = [stack.enter_context(Client(listening["url"])) for _ in range(150)]
        line = process.wait_for("Service Unavailable, next to no files are left")
        assert line["level"] == "warning"
        assert clients[-1].answer().status == 503
        assert descriptors(process.pid) < 95
        clients[0].send(post())
        assert clients[0].answer().status == 200
        assert httpx.get(f"{listening['admin_url']}/healthz").status_code == 200
        for client in clients:
            client.close()
        eventually("it serves again", lambda: serves(listening["url"]))


def test_where_none_is_left_for_a_provider_that_is_said(tmp_path: Path) -> None:
    with running(tmp_path) as (process, url, pid), Client(url) as client:
        client.send(get(b"/healthz"))
        assert client.answer("GET").status == 200
        most = descriptors(pid)
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
        for _ in range(3):
            client.send(post())
            answer = client.answer()
            assert (answer.status, answer.json["error"]["code"]) == (503, "too_many_open_files")
            assert answer.headers["x-should-retry"] == "false"
        line = process.wait_for("no connection can be opened: Too many open files")
        assert line["level"] == "error"
        assert f"ulimit -n is {most}" in line["message"]
        entry = process.wait_for("request", 3)
        assert (entry["status"], entry["error"], entry["outcome"]) == (
            503,
            "too_many_open_files",
            "error",
        )
        assert sum("can be opened" in line["message"] for line in process.lines) == 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most + 10, hard))
        client.send(post())
        assert client.answer().status == 200


def test_it_does_not_begin_with_too_few_descriptors(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'{PORTS}[targets.one]\nurl = "http://127.0.0.1:9/v1"\n')
    process = Process(file)
    try:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (60, 60))  # long before it looks
        code, stderr = process.end()
        assert code == 1
        assert "may open 60 files" in stderr
    finally:
        process.kill()


def test_it_goes_on_after_its_descriptors_ended(tmp_path: Path) -> None:
    with running(tmp_path) as (process, url, pid):
        assert serves(url)
        most = descriptors(pid) + 20
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        with ExitStack() as stack:
            for _ in range(60):
                with suppress(OSError):
                    stack.enter_context(Client(url, patience=5))
            eventually("there are no more", lambda: descriptors(pid) >= most - 2)
        eventually("it serves again", lambda: serves(url))
        assert descriptors(pid) <= most
        assert len(process.lines) < 100


def serves(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.post(f"{url}/v1/chat/completions", json={"model": "m"}, timeout=5).status_code == 200
    return False
