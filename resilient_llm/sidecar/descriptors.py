"""How many connections the descriptors of this process are enough for.

Where they end, connections are closed without a word, and providers cannot be reached: it is better to refuse before.
"""

from __future__ import annotations

from contextlib import suppress

__all__ = ["room_for_connections"]

_MOST = 65_536


def room_for_connections() -> int | None:
    """Raise the limit of open files as far as that is allowed, and give half of it; `None` where there is none.

    Each client's connection may need another one, to a provider.
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
    return None if soft == resource.RLIM_INFINITY else max(1, soft // 2)
