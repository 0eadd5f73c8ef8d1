"""How many connections the descriptors of this process are enough for.

Where they end, connections are closed without a word, and providers cannot be reached: it is better to refuse before.
"""

from __future__ import annotations

import errno
from contextlib import suppress

from resilient_llm.transports.open_files import limit_of_files

__all__ = ["LEAST", "highest_descriptor", "room_for_connections"]

_MOST = 65_536
_BESIDES = 48
"""For what a process has besides: the event loop, listeners, the log, a store, and connections of operators and of
those who are being refused."""
LEAST = 64
"""With fewer files it is not worth beginning."""


def room_for_connections() -> int | None:
    """Raise the limit of open files as far as that is allowed, and give half of the clients' part; `None` without one.

    Each client's connection may need another one, to a provider. Raises `OSError` where there are too few for anything.
    """
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system may have a limit besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return None
    if soft < LEAST:
        raise OSError(
            errno.EMFILE, f"the process may open {soft} files (ulimit -n), and needs {LEAST} at least"
        )
    return (soft - _BESIDES) // 2


def highest_descriptor(*, spare: int) -> int | None:
    """Give the highest descriptor that a client may have where `spare` are kept from them; `None` without a limit.

    The limit on connections need not hold: another may be told, and handshakes, uploads and stores need some, too.
    """
    limit = limit_of_files()
    return None if limit is None else limit - 1 - spare
