"""Start a task that belongs to nobody's cancel scope, on asyncio or trio."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextvars import Context

_running: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references


def spawn(function: Callable[[], Coroutine[object, object, None]], *, name: str) -> None:
    """Run `function` in a new task, in an empty context, until it ends or the event loop does.

    It must not raise an Exception. A task group could not hold it: it would have to be left by the
    task that entered it, and a response may be opened in one task and closed in another.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        trio.lowlevel.spawn_system_task(function, name=name, context=Context())
    else:
        task = asyncio.get_running_loop().create_task(function(), name=name, context=Context())
        _running.add(task)
        task.add_done_callback(_running.discard)
