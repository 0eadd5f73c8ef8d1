"""The subcommands, each in a module that is imported when the command is asked for, or the help of all of them.

So none waits for what only another needs: a sidecar starts without the fake provider.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

__all__ = ["Subcommands"]

_MODULES: Mapping[str, str] = {
    "check-config": "sidecar",
    "config-schema": "sidecar",
    "demo": "demo",
    "fake-provider": "fake_provider",
    "serve": "sidecar",
}


class Subcommands(click.Group):
    """The group of the subcommands."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - click's own
        # By their names click lists them, and finds the one that somebody may have meant.
        super().__init__(commands={name: click.Command(name) for name in _MODULES}, **options)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one of them."""
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"resilient_llm.cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command
