"""The command `resilient-llm` with its subcommands, and how it ends.

What a subcommand does is in a module of its own, which is imported when it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from types import FrameType

import click

import resilient_llm
from resilient_llm.cli.subcommands import Subcommands

__all__ = ["program", "run"]


@click.group(
    cls=Subcommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Each command has a --help of its own. No command needs an API key.",
)
@click.version_option(resilient_llm.__version__, message="%(prog)s %(version)s")
def program() -> None:
    """Resilience for LLM calls: see it work, try your own client against a provider that fails, serve a proxy.

    \b
    Examples:
      resilient-llm demo
      resilient-llm demo --otlp http://localhost:4318 --serve
      resilient-llm fake-provider --port 8001 --faults flaky --latency 0.2
      resilient-llm check-config gateway.toml
      resilient-llm serve --config gateway.toml
    """  # noqa: D301 - \b is click's mark for lines that are not to be joined


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0, 1 for an error, 2 for wrong usage, 128 + n for a signal."""
    stopped_by = signal.SIGINT

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = signal.Signals(number)
        signal.raise_signal(signal.SIGINT)  # which the event loop turns into a cancellation

    before = signal.signal(signal.SIGTERM, stop)
    # A shell starts what runs in its background with SIGINT ignored; then neither signal would stop us.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("uvicorn.error").addFilter(_worth_saying)
    try:
        code = program.main(arguments, prog_name="resilient-llm", standalone_mode=False)
    except click.Abort:
        return 128 + stopped_by
    except click.ClickException as error:
        error.show()
        return error.exit_code
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    return code if isinstance(code, int) else 0


def _worth_saying(record: logging.LogRecord) -> bool:
    """Keep uvicorn from reporting requests that end because the user wants everything to end."""
    cancelled = record.exc_info is not None and record.exc_info[0] is asyncio.CancelledError
    return not cancelled and not record.getMessage().startswith("Cancel ")
