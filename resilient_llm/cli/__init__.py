"""The command line: `resilient-llm demo`, `fake-provider`, `serve`, `check-config`, `config-schema`.

Turns arguments into calls of the library, and the user's mistakes into one line each. Nothing is decided
here that a program could not decide by importing the library instead.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; the entry point of the `resilient-llm` script."""
    try:
        from resilient_llm.cli.program import run  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("Error: the command line needs click: pip install 'resilient-llm[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run())
