"""A collector's port that answers whatever a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def collecting(
    *statuses: int, metrics: int = 200, authorization: str | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Answer requests for traces with these statuses, one after the other, and then with the last of them."""
    seen: list[str] = []
    remaining = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(self.path)
            status = metrics
            if self.path == "/v1/traces":
                status = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            if authorization is not None and self.headers["authorization"] != authorization:
                status = 401
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", seen
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
