"""`resilient-llm demo`: its options, and what its errors look like."""

from __future__ import annotations

import io
import sys

import click

from resilient_llm.cli.checks import base_url, finite
from resilient_llm.cli.extras import needs_extra

__all__ = ["demo"]


@click.command(short_help="Show the policies at work for fifteen seconds.")
@click.option(
    "--duration",
    type=click.FloatRange(2, 3600),
    callback=finite,
    default=15,
    show_default=True,
    metavar="SECONDS",
    help="How long the tenants call.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Draws all that is random.")
@click.option(
    "--otlp",
    callback=base_url,
    metavar="URL",
    help="Send traces and metrics to a collector by OTLP/HTTP, e.g. http://localhost:4318.",
)
@click.option("--serve", is_flag=True, help="Stay up after the run, until Ctrl-C.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="any that is free",
    metavar="PORT",
    help="Where the app listens, on loopback.",
)
@click.option(
    "--plain", is_flag=True, help="No live figures; so it is anyway when the output is no terminal."
)
@click.option("--json", is_flag=True, help="Print the figures once more, as JSON on the last line.")
def demo(
    *, duration: float, seed: int, otlp: str | None, serve: bool, port: int, plain: bool, json: bool
) -> None:
    """Show the policies at work for fifteen seconds.

    Five tenants call a FastAPI app over real sockets. One of them makes 50 times the calls of the others. The
    app calls a fake provider through the OpenAI SDK; the provider throttles, fails and breaks connections, and one
    of its models goes down for a while. Then come each tenant's figures, and one call's trace.

    Everything runs in this process, on loopback: no key, no network. The exit code is 0 when the run
    showed what it is there to show.
    """
    with needs_extra("demo"):
        from rich.console import Console  # noqa: PLC0415 - an extra

        from resilient_llm.demo import DemoError, Settings, run_demo  # noqa: PLC0415 - an extra
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the figures are worth more than their lines and dots
    settings = Settings(
        duration=duration,
        seed=seed,
        port=port,
        otlp=otlp,
        serve=serve,
        live=not plain and sys.stdout.isatty(),
        json=json,
    )
    try:
        run_demo(settings, Console(highlight=False))
    except DemoError as error:
        raise click.ClickException(str(error)) from error
