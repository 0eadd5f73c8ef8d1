"""Both event loops, in virtual time, for every async test.

An async test under `pytest.mark.anyio` runs on asyncio and on trio, each with a fresh virtual clock, so that
hours of backoff take no time. A mock clock against a real socket gives false timeouts: tests over sockets are
marked `realtime` and run on asyncio with its real clock. None of those may depend on how fast a machine is: they
wait with `tests.support.until`, and where a time is what they are about they add to it what `tests.support.stalls`
has measured meanwhile. A property test of async code is a plain function that runs each example with
`resilient_llm.testing.run_virtual`, so that each has a clock of its own.
"""

import os

import pytest
import trio.testing
from hypothesis import settings

from resilient_llm.policies import _hooks
from resilient_llm.testing import VirtualClockEventLoop

settings.register_profile("local", deadline=None, max_examples=100)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_LONG = 40


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what lasts long: at the end one worker would be busy with it, and the others idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each async test its event loops, unless it names them itself."""
    if "anyio_backend" not in metafunc.fixturenames:
        return
    if any("anyio_backend" in str(mark.args[:1]) for mark in metafunc.definition.iter_markers("parametrize")):
        return
    if metafunc.definition.get_closest_marker("realtime"):
        metafunc.parametrize("anyio_backend", ["asyncio"])
    else:
        metafunc.parametrize("anyio_backend", ["asyncio", "trio"], indirect=True)


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    """Have what hooks do wrong said anew: tests share functions, and it is said once of each."""
    _hooks._said.clear()


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """Return the event loop a test runs on, with a virtual clock that nobody has used."""
    if request.param == "trio":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return "asyncio", {"loop_factory": VirtualClockEventLoop}


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name functions by their names and long bytes by their length: workers of one run must agree on ids."""
    if isinstance(val, bytes) and len(val) > _LONG:
        return f"{len(val)} bytes"
    name = getattr(val, "__name__", None)
    return name if callable(val) and isinstance(name, str) else None
