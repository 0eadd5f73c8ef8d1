"""A collector that is away, is something else, or goes away."""

from __future__ import annotations

import socket
import threading

import pytest

from resilient_llm.demo import collector as module
from resilient_llm.demo.collector import Collector, CollectorError
from resilient_llm.demo.recording import recording
from tests.demo.collecting import collecting


def record(collector: Collector, *batches: int) -> None:
    with recording(collector) as recorded:
        tracer = recorded.tracer_provider.get_tracer("tests")
        for batch in batches:
            for _ in range(batch):
                tracer.start_span("a").end()
            recorded.flush()


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
def test_what_was_sent_is_counted(suffix: str) -> None:
    with collecting(200) as (url, seen):
        collector = Collector(url + suffix)
        record(collector, 3, 2)
    assert str(collector) == f"5 spans, and metrics, were sent to {url}"
    assert seen.count("/v1/traces") == 3  # the question, and two batches


def test_a_collector_of_traces_only() -> None:
    with collecting(200, metrics=404) as (url, seen):
        collector = Collector(url)
        record(collector, 3)
    assert str(collector) == f"3 spans were sent to {url}"
    assert seen.count("/v1/metrics") == 1


def test_one_that_goes_away_is_asked_once_more_and_then_left_alone() -> None:
    with collecting(200, 200, 400) as (url, seen):
        collector = Collector(url)
        record(collector, 3, 4, 5, 6)
    assert str(collector) == f"3 spans, and metrics, were sent to {url}; 15 were lost"
    assert seen.count("/v1/traces") == 3


def test_credentials_of_the_environment_are_sent_with_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    with collecting(200, authorization="Bearer secret") as (url, _):
        record(collector := Collector(url), 3)
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_HEADERS")
        with pytest.raises(CollectorError, match="it answers 401 Unauthorized"):
            Collector(url)
    assert collector.spans.sent == 3


def test_something_else_listens() -> None:
    with collecting(404) as (url, _), pytest.raises(CollectorError, match="it answers 404 Not Found"):
        Collector(url)


def test_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(CollectorError, match=r"no answer within 0\.1 s"),
    ):
        Collector(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_it_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")
                connection.recv(65536)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(CollectorError, match="no collector takes OTLP/HTTP traces"):
            Collector(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
