"""The sidecar's processes run on uvloop where there is one, and on asyncio's own event loop where there is none."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from resilient_llm.sidecar.event_loop import run

PROGRAM = """
import asyncio, gc, sys
{before}
from resilient_llm.sidecar.event_loop import run

async def main():
    print(type(asyncio.get_running_loop()).__module__.partition(".")[0], gc.get_freeze_count() > 0)

run(main())
"""


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("before", "loop"), [("import uvloop", "uvloop"), ("sys.modules['uvloop'] = None", "asyncio")]
)
def test_which_loop_it_is(before: str, loop: str) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    program = PROGRAM.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [loop, "True"]


def test_what_a_signal_keeps_from_beginning_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pytest.fail("it began")

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("gc.freeze", interrupted)
    coroutine = main()
    with pytest.raises(KeyboardInterrupt):
        run(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED  # and nobody warns that it never ran
