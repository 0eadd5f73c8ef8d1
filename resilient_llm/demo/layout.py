"""How the demo's figures look in a terminal of 80 columns or more, with colours or without.

Numbers come in as they were measured; nothing is computed here but their looks.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.demo.figures import Figures
from resilient_llm.demo.scenario import FAILING_MODEL, MODEL, NOISE, NOISY, QUIET, UNLUCKY

__all__ = ["duration", "figures_table", "how_to_call", "introduction", "progress", "story"]

_CIRCUIT_STYLE = {CircuitState.CLOSED: "green", CircuitState.HALF_OPEN: "yellow"}


def duration(seconds: float | None) -> str:
    """Write seconds for people; a dash for `None`."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def introduction(outage: float) -> Text:
    """Say who is going to call whom."""
    quiet = ", ".join(tenant.name for tenant in QUIET)
    cast = {
        quiet: f"{QUIET[0].rate:g} calls a second each",
        NOISY.name: f"{NOISY.rate:g} calls a second, {NOISE} times as many",
        UNLUCKY.name: f"{UNLUCKY.rate:g} calls a second of a model that goes down for {outage:g} s",
    }
    lines = Text("A FastAPI app, its tenants, and a provider that fails:\n")
    for names, what in cast.items():
        lines.append(f"  {names:<{len(quiet)}}", "bold").append(f"  {what}\n")
    return lines


def figures_table(figures: Figures, active: Mapping[str, int] | None = None) -> Table:
    """Draw a row for each tenant; with `active`, its calls in flight in place of the middle of its waits."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("tenant", no_wrap=True)
    wait = "wait\np50" if active is None else "active"
    for heading in (
        "calls",
        "ok",
        "rejected",
        "failed",
        "retries",
        wait,
        "wait\np99",
        "total\np50",
        "total\np99",
    ):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for name, tenant in figures.tenants.items():
        table.add_row(
            Text(name, "bold"),
            str(tenant.calls),
            Text(str(tenant.ok), "green"),
            Text(str(tenant.rejected), "yellow" if tenant.rejected else "dim"),
            Text(str(tenant.failed), "red" if tenant.failed else "dim"),
            Text(str(tenant.retries), "cyan" if tenant.retries else "dim"),
            duration(tenant.wait_p50) if active is None else str(active[name]),
            duration(tenant.wait_p99),
            duration(tenant.total_p50),
            duration(tenant.total_p99),
        )
    return table


def progress(
    figures: Figures, active: Mapping[str, int], circuit: CircuitState, elapsed: float, total: float
) -> RenderableType:
    """Draw the run as far as it has come."""
    time = Table.grid(padding=(0, 1, 0, 0))
    time.add_row(
        f"{min(elapsed, total):4.1f} s of {total:g} s", ProgressBar(total, min(elapsed, total), width=40)
    )
    state = Text.assemble(
        f"circuit of {FAILING_MODEL}: ",
        (circuit.value, f"bold {_CIRCUIT_STYLE.get(circuit, 'red')}"),
        f"   provider: {figures.provider_requests} requests, ",
        (f"{figures.failures} failed", "red"),
    )
    return Group(time, figures_table(figures, active), state)


def story(figures: Figures) -> Table:
    """Say in a few lines what has been seen, and what should have been and was not."""
    table = Table.grid(padding=(0, 1, 0, 0))
    if shortfalls := figures.shortfalls():
        for claim in shortfalls:
            table.add_row(Text("✗", "bold red"), f"Not shown: {claim}.")
        return table
    quiet, noisy = figures.quiet, figures.noisy
    for sentence in (
        (
            f"{NOISY.name} made {noisy.calls * len(QUIET) / quiet.calls:.0f} times the calls of a quiet tenant. "
            f"{noisy.ok} of them were served; {noisy.rejected} met its own full bulkhead and got a 429 with "
            f"Retry-After, half of these within {duration(figures.refused_p50)}."
        ),
        (
            f"The quiet tenants did not notice: {quiet.ok} of {quiet.calls} calls served, and a p99 wait for a slot "
            f"of {duration(quiet.wait_p99)} where {NOISY.name} waited {duration(noisy.wait_p99)}."
        ),
        (
            f"The provider failed {figures.failures} of {figures.provider_requests} requests. {figures.retries} "
            f"retries later {noisy.failed or 'none'} of the calls of {MODEL} had failed. A Retry-After had told "
            f"{figures.hinted_retries} of the retries when to come, and none came sooner."
        ),
        (
            f"{FAILING_MODEL} was down for {figures.outage:g} s: its circuit opened, answered "
            f"{figures.circuit_refusals} calls in the provider's stead, and closed again by itself."
        ),
    ):
        table.add_row(Text("•", "bold green"), sentence)
    return table


def how_to_call(app_url: str, provider_url: str) -> Text:
    """Say where everything is and how to try it."""
    curl = (
        f"curl {app_url}/chat -H 'x-tenant: {QUIET[0].name}' "
        """-H 'content-type: application/json' -d '{"message": "Hello"}'"""
    )
    return Text.assemble(
        ("Serving until Ctrl-C\n", "bold"), f"  app       {app_url}\n  provider  {provider_url}\n\n{curl}"
    )
