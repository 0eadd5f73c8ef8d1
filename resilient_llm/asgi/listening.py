"""Answering a request beside listening to its client, who may leave meanwhile.

What is heard, and what it means for the answer, is whoever listens to say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio

__all__ = ["while_listening"]


async def while_listening(
    answer: Callable[[], Awaitable[object]], listen: Callable[[anyio.CancelScope], Coroutine[Any, Any, None]]
) -> None:
    """Await `answer`, and stop listening when it is done; `listen` is given the scope that cancels it.

    Raises what `answer` raises, by itself and in no group.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, tasks.cancel_scope)
            try:
                await answer()
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:  # noqa: BLE001 - raised again below, outside the group
                failure = error
            tasks.cancel_scope.cancel()
    except anyio.get_cancelled_exc_class():
        if failure is None:
            raise
    if failure is None:
        return
    try:
        if isinstance(failure, Exception) or not isinstance(failure, BaseExceptionGroup):
            raise failure
        # On trio a group can hold the cancellation of what is above, which has passed uncaught; this scope takes it.
        with anyio.CancelScope() as scope:  # noqa: ASYNC100 - nothing is awaited in it
            scope.cancel()
            raise failure
    finally:
        del failure  # or its traceback and this frame would hold each other
