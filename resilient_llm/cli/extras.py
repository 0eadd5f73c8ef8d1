"""What to say when a command needs a package that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import inside what comes with an extra of this package; a missing module is named with its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("resilient_llm"):
            raise
        raise click.ClickException(
            f"this command needs {error.name}, which is not installed: pip install 'resilient-llm[{extra}]'"
        ) from error
