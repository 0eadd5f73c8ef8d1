"""How benchmarks run: on the event loop that people use in production. No benchmark itself."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine
from typing import Any

__all__ = ["run"]


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        asyncio.run(main)
        return
    import uvloop  # noqa: PLC0415 - optional

    uvloop.run(main)
