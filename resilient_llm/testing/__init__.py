"""Help for tests: virtual time, a fake provider with scripted faults, and in-memory streaming transports.

Users import it in their own test-suites. It stands apart from the rest of the library, so that a
test's double shares no mistake with what it tests.
"""

from ._fault import OK, Fault
from ._model import FakeModel, Latency
from ._provider import FakeProvider
from ._rate_limits import RateLimits
from ._request_log import ProviderRequest
from ._script import Script, flapping, random_faults
from ._server import serve, serve_forever, serve_in_thread
from ._virtual_loop import VirtualClockEventLoop, run_virtual, virtual_backend
from .httpx import ASGIStreamTransport

__all__ = [
    "OK",
    "ASGIStreamTransport",
    "FakeModel",
    "FakeProvider",
    "Fault",
    "Latency",
    "ProviderRequest",
    "RateLimits",
    "Script",
    "VirtualClockEventLoop",
    "flapping",
    "random_faults",
    "run_virtual",
    "serve",
    "serve_forever",
    "serve_in_thread",
    "virtual_backend",
]
