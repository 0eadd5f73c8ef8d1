"""How many files this process may have open at a time, sockets among them.

What follows where they end, and who is told, is not decided here.
"""

from __future__ import annotations

import errno

__all__ = ["is_lack_of_files", "limit_of_files"]


def limit_of_files() -> int | None:
    """Give the limit that is in force (`ulimit -n`); `None` where there is none."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def is_lack_of_files(error: BaseException) -> bool:
    """Tell whether a file, or a socket, could not be opened since too many are open already, here or in the system."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
