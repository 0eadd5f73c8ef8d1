"""What click does not check about an option's value; each function is an option's `callback`."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

import click

__all__ = ["base_url", "finite"]


def finite(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Refuse infinity and NaN, which every range lets pass."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value!r} is not a finite number")
    return value


def base_url(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuse what is not the URL of an HTTP server."""
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise click.BadParameter(f"{value!r} is not a URL such as http://localhost:4318")
    return value
