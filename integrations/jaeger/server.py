"""A Jaeger of one's own, for as long as a block runs: started on free ports, asked through its query API, stopped.

The program is found by `scripts/jaeger find`; without it there is nothing to start. What is asked for comes as
OTLP again, so that a test reads what Jaeger has kept in the same form as what any other collector received.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import httpx
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.signals import Spans, decode_spans

__all__ = ["Jaeger", "find_jaeger", "running"]

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[2]
CONFIG: Final = Path(__file__).with_name("jaeger.yaml")

_START_TIMEOUT = 30.0
_STOP_TIMEOUT = 5.0
_PORTS = ("OTLP_HTTP", "OTLP_GRPC", "QUERY_HTTP", "QUERY_GRPC")
# Runs a program until standard input ends, which it does even when whoever holds the other end is killed.
_UNTIL_INPUT_ENDS = (
    'exec 3<&0; "$@" & program=$!; { cat <&3; kill "$program"; } 2>/dev/null & wait "$program"'
)
_IDS = ("traceId", "spanId", "parentSpanId")
_MANY = 10_000  # below the max_traces of jaeger.yaml, as it must be


def find_jaeger() -> Path | None:
    """Find the program on PATH or among what `scripts/jaeger` has built; `None` when it is in neither."""
    found = subprocess.run([ROOT / "scripts/jaeger", "find"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else None


class Jaeger:
    """A Jaeger that runs: `otlp` takes spans (OTLP over HTTP), `query` answers questions; both are base URLs.

    `grpc` is the host and port that takes OTLP over gRPC.
    """

    def __init__(self, *, otlp: str, query: str, grpc: str) -> None:
        self.otlp = otlp
        self.grpc = grpc
        self.query = query
        self._client = httpx.Client(base_url=query, timeout=60, trust_env=False)

    def ready(self) -> bool:
        """Tell whether both doors are open."""
        try:
            self._client.get("/api/v3/services").raise_for_status()
            # No bytes are an empty request in protobuf.
            empty = {"content-type": "application/x-protobuf"}
            self._client.post(f"{self.otlp}/v1/traces", headers=empty).raise_for_status()
        except httpx.HTTPError:
            return False
        return True

    def services(self) -> list[str]:
        """Give the services that have sent spans."""
        services: list[str] = self._get("/api/v3/services")["services"]
        return services

    def trace(self, trace_id: str) -> Spans:
        """Give a trace's spans; none when there is no such trace."""
        return _spans(self._get(f"/api/v3/traces/{trace_id}"))

    def traces(self, service: str) -> Spans:
        """Give the spans of all traces of the last hour that a service has a part in."""
        now = datetime.now(UTC)
        return _spans(
            self._get(
                "/api/v3/traces",
                **{
                    "query.service_name": service,
                    "query.start_time_min": (now - timedelta(hours=1)).isoformat(),
                    "query.start_time_max": (now + timedelta(minutes=1)).isoformat(),
                    "query.num_traces": str(_MANY),
                },
            )
        )

    def search(self, service: str, **tags: str) -> set[str]:
        """Give the ids of the traces that have a span with these tags: what the UI's search form asks for.

        Only the UI's own API, which is not promised to stay, can search by tag.
        """
        found = self._get(
            "/api/traces", service=service, limit=str(_MANY), lookback="1h", tags=json.dumps(tags)
        )
        return {trace["traceID"] for trace in found["data"]}

    def wait_for(self, ask: Callable[[], T], done: Callable[[T], bool], *, timeout: float = 60.0) -> T:
        """Ask until the answer will do, and give it; what has been sent is not there at once."""
        until = time.monotonic() + timeout
        while not done(answer := ask()):
            assert time.monotonic() < until, f"after {timeout:g} s the answer still is {answer!r}"
            time.sleep(0.05)
        return answer

    def close(self) -> None:
        """Close the connections to it."""
        self._client.close()

    def _get(self, path: str, **params: str) -> Any:
        response = self._client.get(path, params=params)
        if response.status_code == 404:
            return {}
        response.raise_for_status()
        return json.loads(response.text, object_hook=_with_binary_ids)


@contextmanager
def running(program: Path, *options: str) -> Iterator[Jaeger]:
    """Run Jaeger with this folder's configuration and further options. Raises RuntimeError when it does not start."""
    with ExitStack() as stack:
        ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(
            ["/bin/sh", "-c", _UNTIL_INPUT_ENDS, "sh", program, f"--config={CONFIG}", *options],
            env={**os.environ, **{f"JAEGER_{name}_PORT": str(port) for name, port in ports.items()}},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_stop, process)
        jaeger = Jaeger(
            otlp=f"http://127.0.0.1:{ports['OTLP_HTTP']}",
            query=f"http://127.0.0.1:{ports['QUERY_HTTP']}",
            grpc=f"127.0.0.1:{ports['OTLP_GRPC']}",
        )
        stack.callback(jaeger.close)
        _wait_until_ready(jaeger, process, log)
        yield jaeger


def _free_ports(count: int) -> list[int]:
    """Find ports that nobody listens on; all are held until the last is found, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_ready(jaeger: Jaeger, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    until = time.monotonic() + _START_TIMEOUT
    while not jaeger.ready():
        ended = process.poll()
        if ended is not None or time.monotonic() > until:
            log.seek(0)
            problem = f"ended with {ended}" if ended is not None else f"is not up after {_START_TIMEOUT:g} s"
            raise RuntimeError(f"Jaeger {problem}:\n{log.read()[-2000:]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _with_binary_ids(value: dict[str, Any]) -> Mapping[str, Any]:
    """Rewrite ids: OTLP's JSON has them in hex, protobuf's reading of JSON expects base64."""
    for name in _IDS:
        if name in value:
            value[name] = base64.b64encode(bytes.fromhex(value[name])).decode()
    return value


def _spans(answer: Mapping[str, Any]) -> Spans:
    request = ParseDict(answer.get("result", {}), ExportTraceServiceRequest(), ignore_unknown_fields=True)
    return Spans(decode_spans(request.SerializeToString()))
