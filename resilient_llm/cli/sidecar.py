"""`resilient-llm serve`, `check-config` and `config-schema`: the sidecar from the command line."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from resilient_llm.cli.extras import needs_extra

__all__ = ["check_config", "config_schema", "serve"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Serve the sidecar: a proxy in front of providers, as a configuration says.")
@click.option(
    "--config", "path", type=_FILE, required=True, metavar="FILE", help="The configuration, in TOML."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Processes that share the port, on Linux; instead of server.workers.",
)
def serve(*, path: Path, workers: int | None) -> None:
    """Serve the sidecar until Ctrl-C or SIGTERM; SIGHUP makes it read its configuration again.

    Point the base URL of any client of OpenAI's or Anthropic's API at it. Logs are lines of JSON on standard output.
    """
    _open_standard_files()
    with _no_hang_up():
        _serve(path, workers)


@contextmanager
def _no_hang_up() -> Iterator[None]:
    """Keep SIGHUP waiting, which would end what does not listen to it yet: that who does lets it come."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # one that still waits is for nobody now
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGHUP, handler)


def _open_standard_files() -> None:
    """Open what is closed of the first three files: the next that is opened would be taken for one of them."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)


def _serve(path: Path, workers: int | None) -> None:
    with _uncollected(), needs_extra("sidecar"):
        from resilient_llm.sidecar.config import load  # noqa: PLC0415 - an extra
        from resilient_llm.sidecar.event_loop import run as run_loop  # noqa: PLC0415 - an extra
        from resilient_llm.sidecar.problems import ConfigError  # noqa: PLC0415 - an extra
        from resilient_llm.sidecar.server import configure_logging, run  # noqa: PLC0415 - an extra
        from resilient_llm.sidecar.supervisor import StartError, supervise  # noqa: PLC0415 - an extra
    if sys.stdout is None:
        raise click.ClickException(
            "standard output is closed: the log is written to it; give it a file or a pipe"
        )
    configure_logging()
    try:
        with needs_extra("sidecar"):
            count = workers or load(path).server.workers
            if count > 1 and sys.platform != "linux":
                raise click.ClickException("several workers can share a port on Linux only")
            run_loop(run(path) if count == 1 else supervise(path, count))
    except StartError as error:
        raise click.ClickException(str(error)) from error
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        where = f" on {error.filename}" if error.filename else ""
        raise click.ClickException(f"cannot listen{where}: {error.strerror}") from error


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import modules, which stay, without looking for garbage among them: a tenth of the time goes into that."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@click.command(short_help="Say what is wrong with a configuration of the sidecar.")
@click.argument("path", type=_FILE, metavar="FILE")
@click.option("--no-env", is_flag=True, help="Do not mind environment variables that are not set.")
def check_config(*, path: Path, no_env: bool) -> None:
    """Say what is wrong with a configuration, a line for each thing, or what it makes if nothing is.

    The exit code is 1 when something is wrong.
    """
    with needs_extra("sidecar"):
        from resilient_llm.sidecar.check import check  # noqa: PLC0415 - an extra
        from resilient_llm.sidecar.problems import ConfigError  # noqa: PLC0415 - an extra
    try:
        summary = check(path, environ=None if no_env else os.environ)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    click.echo(summary)


@click.command(short_help="Print the JSON schema of the sidecar's configuration.")
def config_schema() -> None:
    """Print the JSON schema of the sidecar's configuration, for editors."""
    with needs_extra("sidecar"):
        from resilient_llm.sidecar.config import Config  # noqa: PLC0415 - an extra
    click.echo(json.dumps(Config.model_json_schema(), indent=2))
