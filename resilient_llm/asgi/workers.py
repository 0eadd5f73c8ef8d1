"""A word at startup when a limit that counts in one process stands in several.

Only what can be seen from inside one of them: the server's command line and environment. What limits do, and how they
could be shared, must not enter here.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath

from resilient_llm.ordering import policy_name
from resilient_llm.policies.budget import Budget
from resilient_llm.policies.bulkhead import Bulkhead
from resilient_llm.policies.ledger import MemoryLedger
from resilient_llm.policies.rate_limit import RateLimit
from resilient_llm.stores import MemoryStore
from resilient_llm.stores._memory_values import MemoryBudgets

__all__ = ["warn_of_workers", "worker_count"]

logger = logging.getLogger("resilient_llm")

_SERVERS = {"uvicorn", "gunicorn", "hypercorn", "granian", "fastapi"}
_OPTION = re.compile(r"(?:--workers=?|-w)(\d*)")


def worker_count(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Say how many workers the server has been told to run; 1 where nobody says.

    As uvicorn, gunicorn, hypercorn, granian and `fastapi run` read it: `--workers`, else `WEB_CONCURRENCY`. One that
    is started from a program (`uvicorn.run(..., workers=4)`) does not show it.
    """
    if argv and _program(argv[0]) in _SERVERS:
        told = _option(argv[1:])
        if told is None:
            told = _option(environ.get("GUNICORN_CMD_ARGS", "").split())
        if told is not None:
            return told
    told_by_all = environ.get("WEB_CONCURRENCY", "")
    return int(told_by_all) if told_by_all.isdecimal() else 1


def warn_of_workers(policies: Iterable[object]) -> None:
    """Log which of these limits count in this process only, where there are several."""
    workers = worker_count(sys.argv, os.environ)
    if workers < 2:
        return
    local = [policy_name(policy) for policy in policies if _is_local(policy)]
    if local:
        logger.warning(
            "%s: counted in each process, and the server runs %d workers: together they let up to %d times as much "
            "through; divide the limits by that, or let the workers share them",
            ", ".join(local),
            workers,
            workers,
        )


def _is_local(policy: object) -> bool:
    """Tell whether a policy is a fixed limit that nobody else knows the count of."""
    if isinstance(policy, Budget):
        return policy.ledger is None or isinstance(policy.ledger, MemoryLedger | MemoryBudgets)
    if isinstance(policy, Bulkhead | RateLimit):
        return policy.store is None or isinstance(policy.store, MemoryStore)
    return False


def _program(path: str) -> str:
    """Give the name of what runs: `uvicorn`, also as `python -m uvicorn`."""
    called = PurePath(path)
    return called.parent.name if called.name == "__main__.py" else called.stem


def _option(arguments: Sequence[str]) -> int | None:
    """Find `--workers 4`, `--workers=4`, `-w 4` or `-w4`; the last one counts."""
    told = None
    for argument, following in pairwise([*arguments, ""]):
        if found := _OPTION.fullmatch(argument):
            number = found[1] or following
            told = int(number) if number.isdecimal() else told
    return told
