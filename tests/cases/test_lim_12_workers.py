"""LIM-12: a limit of one process under a server with several workers says so when it starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from resilient_llm import Budget, Bulkhead, ConcurrencyLimit, Deadline, Policy, RateLimit
from resilient_llm.asgi import LLMMiddleware, ResilienceMiddleware
from resilient_llm.asgi.workers import worker_count
from resilient_llm.stores import MemoryStore
from resilient_llm.stores.redis import RedisStore

UVICORN = ["/app/.venv/bin/uvicorn", "app:app"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a server would that has not been told how many workers to start."""
    monkeypatch.setattr("sys.argv", UVICORN)
    for name in ("WEB_CONCURRENCY", "GUNICORN_CMD_ARGS"):
        monkeypatch.delenv(name, raising=False)


def start(middleware: Any, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """Start and stop an app, and give what was logged."""
    app = Starlette()
    app.add_middleware(middleware, **options)
    with caplog.at_level(logging.WARNING, logger="resilient_llm"), TestClient(app):
        pass
    return [record.getMessage() for record in caplog.records if record.name == "resilient_llm"]


def test_lim_12_startup_warns_of_local_limits_when_there_are_several_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    policies: list[Policy] = [Deadline(30), Bulkhead(max_concurrent=10), RateLimit(requests_per_minute=60)]
    (said,) = start(ResilienceMiddleware, caplog, tenant=None, policies=policies)
    assert said.startswith("bulkhead, rate_limit: counted in each process, and the server runs 4 workers")


def test_lim_12_so_does_the_client_of_an_app(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", [*UVICORN, "--workers", "2"])
    (said,) = start(LLMMiddleware, caplog, policies=[Budget(tokens_per_day=1e6, name="caps")])
    assert said.startswith("caps: ")
    assert "2 workers" in said


def test_lim_12_nothing_is_said_for_one_worker(caplog: pytest.LogCaptureFixture) -> None:
    assert start(ResilienceMiddleware, caplog, tenant=None, policies=[Bulkhead(max_concurrent=10)]) == []


def test_lim_12_nor_of_limits_that_processes_share_or_find_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    store = RedisStore("redis://localhost:1/0")
    policies: list[Policy] = [RateLimit(requests_per_minute=60, store=store), ConcurrencyLimit()]
    assert start(LLMMiddleware, caplog, policies=policies) == []


def test_lim_12_a_store_in_memory_is_shared_with_no_other_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    policies: list[Policy] = [RateLimit(requests_per_minute=60, store=MemoryStore())]
    assert len(start(LLMMiddleware, caplog, policies=policies)) == 1


@pytest.mark.parametrize(
    ("argv", "environ", "workers"),
    [
        ([], {}, 1),
        (UVICORN, {}, 1),
        ([*UVICORN, "--workers", "4"], {}, 4),
        ([*UVICORN, "--workers=4"], {"WEB_CONCURRENCY": "2"}, 4),
        (UVICORN, {"WEB_CONCURRENCY": "2"}, 2),
        (UVICORN, {"WEB_CONCURRENCY": "many"}, 1),
        (["/lib/uvicorn/__main__.py", "app:app", "--workers", "3"], {}, 3),
        (["gunicorn", "-w", "5", "app:app"], {}, 5),
        (["gunicorn", "-w5", "app:app"], {}, 5),
        (["gunicorn", "app:app"], {"GUNICORN_CMD_ARGS": "--workers=3 --bind=0.0.0.0"}, 3),
        (["gunicorn", "app:app", "--workers"], {}, 1),
        (["fastapi", "run", "--workers", "4"], {}, 4),
        (["/home/me/fastapi/train.py", "-w", "5"], {}, 1),
    ],
)
def test_lim_12_how_many_workers_there_are(
    argv: Sequence[str], environ: dict[str, str], workers: int
) -> None:
    assert worker_count(argv, environ) == workers
