"""A sidecar of several processes: they share a port, are operated as one, and outlive each other but not the first."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from resilient_llm.sidecar.config import parse
from resilient_llm.sidecar.crew import Crew, StartError
from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.certificates import Authority
from tests.sidecar.process import PORTS, Gate, Process, started, until
from tests.sidecar.support import ANSWER, ASK
from tests.sidecar.test_tls import shown, trusting

pytest.importorskip("uvicorn")
if not hasattr(os, "fork") or os.uname().sysname != "Linux":
    pytest.skip("several workers share a port on Linux only", allow_module_level=True)

pytestmark = pytest.mark.realtime

CHAT = "/v1/chat/completions"


def written(file: Path, upstream: str, more: str = "") -> Path:
    file.write_text(
        f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\n[targets.two]\nurl = "{upstream}/v1"\n{more}'
    )
    return file


def asked(url: str) -> int:
    """Ask on a connection of its own, and give the status."""
    return httpx.post(f"{url}{CHAT}", json=ASK, timeout=60).status_code


def workers_of(admin: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{admin}/admin/health", timeout=60).json()["workers"]
    return found


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def used(process: Process) -> set[int]:
    """Give which workers have answered."""
    return {line["worker"] for line in process.lines if line["message"] == "request"}


def test_they_share_a_port_and_are_operated_as_one(tmp_path: Path) -> None:
    with serve_in_thread(FakeProvider()) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        with started(file, "--workers", "2") as (process, url, admin):
            note = process.wait_for("each worker counts for itself")["message"]
            assert "bulkheads, circuits; up to 2 times" in note
            sent = 0
            while used(process) != {1, 2}:
                assert asked(url) == 200
                sent += 1
                process.wait_for("request", sent)

            health = httpx.get(f"{admin}/admin/health", timeout=60).json()
            assert health["attempts"] == sum(target["attempts"] for target in health["targets"]) == sent
            assert [(one["worker"], one["restarts"]) for one in health["workers"]] == [(1, 0), (2, 0)]
            metrics = httpx.get(f"{admin}/metrics", timeout=60).text
            counts = [
                (line.partition("{")[2].partition(",")[0], float(line.rpartition(" ")[2]))
                for line in metrics.splitlines()
                if line.startswith("gen_ai_client_operation_duration_seconds_count{")
            ]
            assert {worker for worker, _ in counts} == {'worker="1"', 'worker="2"'}
            assert sum(count for _, count in counts) == sent
            assert metrics.count("# TYPE gen_ai_client_operation_duration_seconds ") == 1
            assert 'resilient_llm_worker_up{worker="2"} 1' in metrics
            assert len(set(re.findall(r'service_instance_id="([^"]+)"', metrics))) == 2
            assert httpx.get(f"{admin}/readyz", timeout=60).text == "ok\n"
            assert httpx.get(f"{admin}/admin/config", timeout=60).json()["config"]["targets"].keys() == {
                "one",
                "two",
            }

            done = httpx.post(f"{admin}/admin/targets/one/weight", json={"weight": 1e-9}, timeout=60)
            assert done.json() == {"weight": ["one"]}
            assert (
                httpx.post(f"{admin}/admin/targets/one/weight", json={"weight": 0}, timeout=60).status_code
                == 422
            )
            assert (
                httpx.post(f"{admin}/admin/targets/none/weight", json={"weight": 1}, timeout=60).status_code
                == 404
            )
            assert httpx.post(f"{admin}/admin/circuits/two/isolate", timeout=60).json() == {
                "isolate": ["two"]
            }
            assert httpx.post(f"{admin}/admin/circuits/one/isolate", timeout=60).status_code == 200
            assert {asked(url) for _ in range(20)} == {503}
            by_hand = {
                one["name"]: one["by_hand"]
                for one in httpx.get(f"{admin}/admin/health", timeout=60).json()["targets"]
            }
            assert by_hand == {"one": ["isolated", "weight"], "two": ["isolated"]}
            assert httpx.post(f"{admin}/admin/circuits/one/close", timeout=60).status_code == 200
            assert {asked(url) for _ in range(10)} == {200}


def test_one_that_is_killed_is_started_again_while_others_go_on(tmp_path: Path) -> None:
    with serve_in_thread(FakeProvider()) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        with started(file, "--workers", "2") as (process, url, admin):
            assert (
                httpx.post(f"{admin}/admin/targets/one/weight", json={"weight": 2}, timeout=60).status_code
                == 200
            )
            assert httpx.post(f"{admin}/admin/circuits/two/isolate", timeout=60).status_code == 200
            killed = workers_of(admin)[0]["pid"]
            os.kill(killed, signal.SIGKILL)
            ended = process.wait_for("a worker ended")
            assert (ended["worker_ended"], ended["how"]) == (1, "signal 9")
            assert {asked(url) for _ in range(10)} == {200}
            process.wait_for("a worker is back")
            assert [(one["worker"], one["restarts"]) for one in workers_of(admin)] == [(1, 1), (2, 0)]
            assert workers_of(admin)[0]["pid"] != killed
            assert (
                'resilient_llm_worker_restarts_total{worker="1"} 1'
                in httpx.get(f"{admin}/metrics", timeout=60).text
            )

            def of_the_first() -> list[dict[str, Any]]:
                lines = [line for line in process.lines if line["message"] == "request"]
                return [line for line in lines if line["worker"] == 1]

            before = len(of_the_first())
            until(lambda: asked(url) == 200 and len(of_the_first()) > before)
            assert of_the_first()[-1]["target"] == "one"
            # What was changed by hand it has been told.
            targets = httpx.get(f"{admin}/admin/health", timeout=60).json()["targets"]
            assert {one["name"]: one["by_hand"] for one in targets} == {
                "one": ["weight"],
                "two": ["isolated"],
            }


def test_one_that_begins_while_something_changes_is_told_of_it(tmp_path: Path) -> None:
    with serve_in_thread(FakeProvider()) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        with started(file, "--workers", "2") as (process, url, admin):
            os.kill(workers_of(admin)[0]["pid"], signal.SIGKILL)
            process.wait_for("a worker ended")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            until(
                lambda: len(children.read_text().split()) == 2
            )  # it has been started, and does not serve yet
            file.write_text(file.read_text().replace("[targets.one]", "[targets.three]"))
            assert httpx.post(f"{admin}/admin/reload", timeout=60).status_code == 200
            assert httpx.post(f"{admin}/admin/circuits/two/isolate", timeout=60).status_code == 200
            process.wait_for("a worker is back")
            until(lambda: all(one["pid"] for one in workers_of(admin)))

            def are_told() -> bool:
                targets = httpx.get(f"{admin}/admin/health", timeout=60).json()["targets"]
                return {(one["name"], *one["by_hand"]) for one in targets} == {
                    ("three",),
                    ("two", "isolated"),
                }

            until(are_told)
            answered = set()
            while used(process) != {1, 2}:
                reply = httpx.post(f"{url}{CHAT}", json=ASK, timeout=60)
                answered.add(reply.headers["x-resilient-llm-target"])
            assert answered == {"three"}


def test_they_are_not_ready_while_all_of_them_hang(tmp_path: Path) -> None:
    with serve_in_thread(FakeProvider()) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        with started(file, "--workers", "2") as (process, _url, admin):
            pids = [one["pid"] for one in workers_of(admin)]

            def ready() -> tuple[int, str]:
                answer = httpx.get(f"{admin}/readyz", timeout=60)
                return answer.status_code, answer.text

            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                until(lambda: ready() == (503, "no worker serves\n"))  # without anybody asking for more
                process.wait_for("a worker does not answer", 2)
                with ThreadPoolExecutor(2) as pool:  # who asks for more meanwhile learns nothing new
                    metrics = [pool.submit(httpx.get, f"{admin}/metrics", timeout=60) for _ in range(2)]
                    assert {one.result().status_code for one in metrics} == {503}
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            until(lambda: ready() == (200, "ok\n"))
            process.wait_for("a worker answers again", 2)
            silent = [line for line in process.lines if line["message"] == "a worker does not answer"]
            assert [line["level"] for line in silent] == ["error", "error"]
            assert sorted((line["worker_silent"], line["pid"]) for line in silent) == [
                (1, pids[0]),
                (2, pids[1]),
            ]
            back = [
                line["worker_back"] for line in process.lines if line["message"] == "a worker answers again"
            ]
            assert sorted(back) == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_they_drain_together(number: signal.Signals, tmp_path: Path) -> None:
    provider = Gate(FakeProvider())
    with serve_in_thread(provider) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        with started(file, "--workers", "2") as (process, url, admin):
            with httpx.stream("POST", f"{url}{CHAT}", json={**ASK, "stream": True}, timeout=60) as stream:
                parts = stream.iter_raw()
                received = next(parts)
                os.killpg(process.pid, number)  # as terminals and service managers do
                process.wait_for("draining", 2)
                assert httpx.get(f"{admin}/readyz", timeout=60).status_code == 503
                provider.open()
                received += b"".join(parts)
            assert received.endswith(b"data: [DONE]\n\n")
            assert process.end() == (0, "")
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/healthz", timeout=60)


def test_a_reload_is_for_all_or_for_none_and_loses_no_request(tmp_path: Path) -> None:
    provider = FakeProvider(max_requests_kept=0)
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        texts = [f'{PORTS}workers = 2\n[targets.{name}]\nurl = "{upstream}/v1"\n' for name in ("one", "two")]
        texts = [
            text.replace("workers = 2\n", "").replace("[server]\n", "[server]\nworkers = 2\n")
            for text in texts
        ]
        file.write_text(texts[0])

        def client(url: str) -> list[tuple[int, str]]:
            found = []
            for _ in range(10):
                with httpx.Client(timeout=60) as http:
                    replies = [http.post(f"{url}{CHAT}", json=ASK) for _ in range(4)]
                found += [(reply.status_code, reply.headers["x-resilient-llm-target"]) for reply in replies]
            return found

        with started(file) as (process, url, admin), ThreadPoolExecutor(4) as pool:
            file.write_text(texts[1] + "wieght = 2\n")
            process.signal(signal.SIGHUP)
            why = process.wait_for("the configuration was not reloaded")
            assert f"{file}:9: targets.two.wieght: unknown key" in why["message"]
            assert "worker" not in why  # none of them was told
            assert {
                httpx.post(f"{url}{CHAT}", json=ASK, timeout=60).headers["x-resilient-llm-target"]
                for _ in range(8)
            } == {"one"}

            # One that dies meanwhile comes back with what the others have, not with the file.
            os.kill(workers_of(admin)[1]["pid"], signal.SIGKILL)
            process.wait_for("a worker is back")
            assert (
                httpx.get(f"{admin}/admin/health", timeout=60).json()["reload"]["error"]
                == why["message"].partition(": ")[2]
            )

            clients = [pool.submit(client, url) for _ in range(4)]
            for number in range(1, 6):
                process.wait_for("request", 8 + 25 * number)
                file.write_text(texts[number % 2])
                assert httpx.post(f"{admin}/admin/reload", timeout=60).json()["reloaded"] is True
            answers = [answer for each in clients for answer in each.result(60)]
            assert {
                httpx.post(f"{url}{CHAT}", json=ASK, timeout=60).headers["x-resilient-llm-target"]
                for _ in range(8)
            } == {"two"}
            process.signal(signal.SIGTERM)
            assert process.end()[0] == 0
    assert {status for status, _ in answers} == {200}
    assert {target for _, target in answers} == {"one", "two"}


def test_a_second_signal_kills_them(tmp_path: Path) -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(stall_after_tokens=2))
    with serve_in_thread(provider) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        file.write_text(file.read_text().replace("drain_timeout = 50", "drain_timeout = 600"))
        with (
            started(file, "--workers", "2") as (process, url, admin),
            httpx.stream("POST", f"{url}{CHAT}", json={**ASK, "stream": True}, timeout=60) as stream,
        ):
            pids = [one["pid"] for one in workers_of(admin)]
            parts = stream.iter_raw()
            next(parts)
            process.signal(signal.SIGTERM)
            process.wait_for("draining", 2)
            process.signal(signal.SIGTERM)
            assert process.end()[0] == 0
            assert not any(map(is_there, pids))


def test_they_end_without_the_process_that_started_them(tmp_path: Path) -> None:
    with serve_in_thread(FakeProvider()) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        with started(file, "--workers", "2") as (process, url, admin):
            pids = [one["pid"] for one in workers_of(admin)]
            assert asked(url) == 200
            os.kill(process.pid, signal.SIGKILL)
            process.wait_for("the supervisor is gone", 2)
            until(lambda: not any(map(is_there, pids)))
        with suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


def test_without_an_admin_listener_and_one_at_last(tmp_path: Path) -> None:
    with serve_in_thread(FakeProvider()) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        text = file.read_text().replace("[admin]\nport = 0\n", "[admin]\nenabled = false\n")
        file.write_text(text.replace("[server]\n", "[server]\nworkers = 2\n"))
        with started(file) as (process, url, admin):
            assert admin is None
            assert asked(url) == 200
            process.signal(signal.SIGTERM)
            assert process.end() == (0, "")
        with started(file, "--workers", "1") as (process, url, _):
            assert asked(url) == 200
            assert not [line for line in process.lines if "worker" in line]


def test_a_port_that_somebody_has_is_not_shared(tmp_path: Path) -> None:
    with serve_in_thread(FakeProvider()) as upstream:
        port = upstream.rpartition(":")[2]
        file = written(tmp_path / "gateway.toml", upstream)
        file.write_text(file.read_text().replace("port = 0", f"port = {port}", 1))
        code, stderr = Process(file, "--workers", "2").end()
    assert code == 1
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in stderr


def test_tls_and_ipv6_on_several_workers(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.sign("server", serial=5)
    with serve_in_thread(FakeProvider()) as upstream:
        file = written(tmp_path / "gateway.toml", upstream)
        tls = '[server]\nhost = "::1"\ntls = { certificate = "server.crt", key = "server.key" }\n'
        file.write_text(
            file.read_text().replace("[server]\n", tls).replace("[admin]\n", '[admin]\nhost = "::1"\n')
        )
        with started(file, "--workers", "2") as (process, url, admin):
            assert url.startswith("https://[::1]:")
            assert admin.startswith("http://[::1]:")
            context = trusting(authority)
            reply = httpx.post(f"{url}{CHAT}", json=ASK, verify=context, timeout=60)
            assert reply.json()["choices"][0]["message"]["content"] == ANSWER
            authority.sign("server", serial=6)
            assert httpx.post(f"{admin}/admin/reload", timeout=60).status_code == 200
            assert {shown(url, context)[0] for _ in range(8)} == {6}
            process.signal(signal.SIGTERM)
            assert process.end() == (0, "")


@pytest.mark.anyio
async def test_a_worker_that_cannot_begin_ends_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    first = {"path": "gateway.toml", "started": '[targets.one]\nurl = "http://one.example"\n', "text": "["}
    crew = Crew("127.0.0.1", 0, 2, drain_timeout=1, first=lambda: first)
    try:
        with anyio.fail_after(60), pytest.raises(StartError, match=r"worker . could not start: exit code 1"):
            await crew.start()
    finally:
        await crew.aclose()
    assert "cannot start: gateway.toml: not TOML" in capfd.readouterr().out


def test_how_many_is_for_the_system_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[server]\nworkers = 2\n[targets.one]\nurl = "http://one.example"\n'
    assert parse(text).server.workers == 2
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(
        ValueError, match=r"server\.workers = 2: several processes can share a port on Linux only"
    ):
        parse(text)
