"""`resilient-llm fake-provider`: the fake provider of `resilient_llm.testing` on a socket."""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random

import anyio
import click

from resilient_llm.cli.checks import finite
from resilient_llm.cli.extras import needs_extra
from resilient_llm.cli.faults import PRESETS, FaultsError, read_faults
from resilient_llm.testing import FakeModel, FakeProvider, Latency, RateLimits, serve

__all__ = ["fake_provider"]


@click.command(short_help="Serve a provider that speaks OpenAI's and Anthropic's APIs and fails as told.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=8000,
    show_default=True,
    help="The port to listen on; 0 is any free one.",
)
@click.option(
    "--faults",
    default="none",
    show_default=True,
    metavar="NAME|FILE",
    help=f"What goes wrong: {', '.join(PRESETS)}, or a JSON file (see below).",
)
@click.option(
    "--latency",
    type=click.FloatRange(0),
    callback=finite,
    default=0.0,
    metavar="SECONDS",
    help="The time until the response begins.",
)
@click.option(
    "--token-latency",
    type=click.FloatRange(0),
    callback=finite,
    default=0.0,
    metavar="SECONDS",
    help="The time between two tokens.",
)
@click.option(
    "--rpm",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    metavar="NUMBER",
    help="Requests let in per minute.",
)
@click.option(
    "--tpm",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    metavar="NUMBER",
    help="Tokens let in per minute.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Draws the faults that come by chance.")
def fake_provider(
    *,
    host: str,
    port: int,
    faults: str,
    latency: float,
    token_latency: float,
    rpm: float | None,
    tpm: float | None,
    seed: int,
) -> None:
    """Serve a provider that speaks OpenAI's and Anthropic's APIs, streaming or not, and fails as told.

    Any model and any key will do. It needs no network and knows nothing: its answers are always the same.

    A file of faults holds a JSON list, e.g.

    \b
      [{"chance": 0.1, "status": 429, "headers": {"retry-after": "2"}},
       {"chance": 0.05, "cut_after_tokens": 3}]

    With a chance in every fault each request draws one; without, they are played one a request, in order.
    An object {"some-model": [...], "*": [...]} has lists by model. The fields are those of
    resilient_llm.testing.Fault.
    """  # noqa: D301 - \b is click's mark for lines that are not to be joined
    try:
        scripts = read_faults(faults, Random(seed))
    except FaultsError as error:
        raise click.BadParameter(str(error), param_hint="--faults") from error
    limits = None
    if rpm is not None or tpm is not None:
        limits = RateLimits(requests_per_minute=rpm, tokens_per_minute=tpm)
    model = FakeModel(latency=Latency(headers=latency, per_token=token_latency), rate_limits=limits)
    provider = FakeProvider(model, max_requests_kept=0)
    for name, script in scripts.items():
        provider.script(name, script)
    with needs_extra("cli"):
        import uvicorn  # noqa: F401, PLC0415 - an extra, which `serve` imports on use
    anyio.run(_serve, provider, host, port, backend="asyncio")


async def _serve(provider: FakeProvider, host: str, port: int) -> None:
    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(serve(provider, host=host, port=port))
        except OSError as error:
            raise click.ClickException(f"cannot listen on {host}, port {port}: {error.strerror}") from error
        click.echo(f"The fake provider serves until Ctrl-C\n  OpenAI     {url}/v1\n  Anthropic  {url}")
        await anyio.sleep_forever()
