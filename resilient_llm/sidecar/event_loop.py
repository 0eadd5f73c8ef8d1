"""How the sidecar's processes run: on uvloop where it is installed, and with the garbage collector out of the way.

What runs is not seen here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Coroutine
from typing import Any

__all__ = ["run"]

_THRESHOLDS = (20_000, 20, 50)
"""Objects until cycles are looked for; by default so few that a busy process does so for every few requests."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end, as `asyncio.run` does."""
    with contextlib.closing(main):  # which a signal may keep from beginning
        try:
            import uvloop  # noqa: PLC0415 - there is none for some platforms
        except ModuleNotFoundError:
            factory = None
        else:
            factory = uvloop.new_event_loop
        gc.freeze()  # the modules stay: there is no need to go through them again and again
        gc.set_threshold(*_THRESHOLDS)
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)
