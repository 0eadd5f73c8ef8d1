"""A collector in the test's own process, behind a real socket."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tests.signals import Point, Points, Span, Spans, Value, decode_points, decode_spans


class Receiver:
    """An OTLP/HTTP collector on a local port, for as long as its `with` block runs."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[Span] = []
        self._points: dict[tuple[str, frozenset[tuple[str, Value]]], Point] = {}
        self._failures: list[Exception] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """Its base URL; exporters add `/v1/traces` and `/v1/metrics`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> Spans:
        """What has come so far."""
        with self._arrived:
            return Spans(self._spans)

    @property
    def points(self) -> Points:
        """The newest of each series."""
        with self._arrived:
            return Points(points=list(self._points.values()))

    def wait_for(self, done: Callable[[Receiver], bool], *, timeout: float = 60.0) -> None:
        """Wait until enough has come. What an exporter says of itself proves nothing."""
        with self._arrived:
            arrived = self._arrived.wait_for(lambda: bool(self._failures) or done(self), timeout)
        if self._failures:
            raise self._failures[0]
        assert arrived, f"after {timeout:g} s there are only\n{self.spans.tree()}\n{self.points.names()}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _receive(self, path: str, body: bytes) -> bytes:
        if path == "/v1/traces":
            spans = decode_spans(body)
            with self._arrived:
                self._spans.extend(spans)
                self._arrived.notify_all()
            return bytes(ExportTraceServiceResponse().SerializeToString())
        points = decode_points(body)
        with self._arrived:
            self._points.update(
                {(point.name, frozenset(point.attributes.items())): point for point in points}
            )
            self._arrived.notify_all()
        return bytes(ExportMetricsServiceResponse().SerializeToString())

    def _fail(self, error: Exception) -> None:
        with self._arrived:
            self._failures.append(error)
            self._arrived.notify_all()

    def _handler(receiver) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the request's below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                try:
                    if self.headers["content-encoding"] == "gzip":
                        body = gzip.decompress(body)
                    answer, status = receiver._receive(self.path, body), 200
                except Exception as error:  # noqa: BLE001 - the test is told
                    receiver._fail(error)
                    answer, status = b"", 500
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        return Handler
