"""Run the demo: two servers and five tenants in one event loop, then the figures.

Puts the parts together and prints what they have to say. What happens and what it means is theirs.
"""

from __future__ import annotations

import json
import os
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

import anyio
import anyio.to_thread
import httpx2
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from rich.console import Console
from rich.live import Live
from rich.text import Text
from starlette.types import ASGIApp

from resilient_llm.demo import layout
from resilient_llm.demo.collector import Collector, CollectorError
from resilient_llm.demo.figures import Figures, SpanFigures
from resilient_llm.demo.load import Load
from resilient_llm.demo.recording import Recording, ServerSpans, recording
from resilient_llm.demo.scenario import FAILING_MODEL, Faults, create_provider
from resilient_llm.demo.service import Service, create_service
from resilient_llm.demo.trace_tree import draw, most_interesting
from resilient_llm.testing import serve

__all__ = ["DemoError", "Settings", "run_demo"]

_REFRESH: Final = 0.25  # seconds
_LAST_SPANS: Final = 1.0  # seconds that the spans of the last answers may take to end
_HOST: Final = "127.0.0.1"


class DemoError(Exception):
    """The demo cannot run, or did not show what it is there to show; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run: for `duration` seconds, the app on `port` (0: any free one), chance drawn from `seed`.

    `otlp` is the base URL of a collector for spans and metrics. With `serve` everything stays up after the
    run, until cancelled. `live` shows the figures while they change, on a terminal. `json` prints them once
    more, as one line.
    """

    duration: float = 15.0
    seed: int = 1
    port: int = 0
    otlp: str | None = None
    serve: bool = False
    live: bool = True
    json: bool = False


def run_demo(settings: Settings, console: Console) -> None:
    """Run the demo and print what it measured. Raises `DemoError`."""
    if os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true":
        raise DemoError(f"the demo reads its figures from spans, and {OTEL_SDK_DISABLED} is set: unset it")
    try:
        collector = None if settings.otlp is None else Collector(settings.otlp)
    except CollectorError as error:
        raise DemoError(str(error)) from error
    with recording(collector) as recorded:
        anyio.run(_Demo(settings, console, recorded, collector).run, backend="asyncio")


class _Demo:
    """One run of the demo."""

    def __init__(
        self, settings: Settings, console: Console, recorded: Recording, collector: Collector | None
    ) -> None:
        self._settings = settings
        self._console = console
        self._recorded = recorded
        self._collector = collector
        self._faults = Faults(settings.duration, settings.seed)
        self._provider = create_provider(self._faults, settings.seed)
        self._spans = SpanFigures()

    async def run(self) -> None:
        """Serve, measure, report."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            provider_url = await _listen(stack, self._provider)
            service = create_service(
                provider_url,
                break_duration=self._faults.outage / 4,
                rng=Random(f"{settings.seed} jitter"),
                inbound=self._recorded.telemetry(),
                outbound=self._recorded.telemetry(),
            )
            service.app.add_middleware(ServerSpans, tracer_provider=self._recorded.tracer_provider)
            await stack.enter_async_context(service.client)
            app_url = await _listen(stack, service.app, settings.port)
            self._console.print(layout.introduction(self._faults.outage))
            figures = await self._measure(service, app_url)
            await self._report(figures)
            if settings.serve:
                self._recorded.stop_keeping()
                self._console.print(layout.how_to_call(app_url, f"{provider_url}/v1"), soft_wrap=True)
                await anyio.sleep_forever()
        if figures.shortfalls():
            raise DemoError("this run did not show what the demo is there to show")
        if self._collector is not None and self._collector.spans.lost:
            raise DemoError(f"the collector at {self._collector.url} stopped answering")

    async def _measure(self, service: Service, app_url: str) -> Figures:
        limits = httpx2.Limits(max_connections=None)  # or the tenants would queue before they call
        async with (
            httpx2.AsyncClient(base_url=app_url, timeout=30, limits=limits, trust_env=False) as client,
            anyio.create_task_group() as tasks,
        ):
            load = Load(client, duration=self._settings.duration, seed=self._settings.seed)
            self._faults.start(anyio.current_time())
            if self._settings.live:
                tasks.start_soon(self._show, service, load)
            await load.run()
            tasks.cancel_scope.cancel()
        return await self._final_figures(load)

    async def _show(self, service: Service, load: Load) -> None:
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                active = {name: tally.active for name, tally in load.tallies.items()}
                live.update(
                    layout.progress(
                        self._figures(load),
                        active,
                        service.breaker.state(FAILING_MODEL),
                        load.elapsed,
                        self._settings.duration,
                    ),
                    refresh=True,
                )
                await anyio.sleep(_REFRESH)

    async def _final_figures(self, load: Load) -> Figures:
        figures = self._figures(load)
        with anyio.move_on_after(_LAST_SPANS):
            while self._spans.requests < load.calls:  # a server's span ends after its client has the answer
                await anyio.sleep(0.01)
                figures = self._figures(load)
        return figures

    def _figures(self, load: Load) -> Figures:
        self._spans.add(self._recorded.new_spans())
        return Figures.of(load, self._spans, self._faults, self._provider.total_requests)

    async def _report(self, figures: Figures) -> None:
        console = self._console
        console.print(layout.figures_table(figures))
        trace = most_interesting(self._recorded.spans())
        if trace is not None:
            console.print(Text(f"\nOne call's trace, {trace.trace_id}\n", "bold"))
            console.print(draw(trace, console.width))
            console.print()
        console.print(layout.story(figures))
        console.print()
        if self._collector is not None:
            await anyio.to_thread.run_sync(self._recorded.flush, abandon_on_cancel=True)
            console.print(str(self._collector), soft_wrap=True)
        if self._settings.json:
            console.out(json.dumps(asdict(figures)), highlight=False)


async def _listen(stack: AsyncExitStack, app: ASGIApp, port: int = 0) -> str:
    try:
        return await stack.enter_async_context(serve(app, host=_HOST, port=port))
    except OSError as error:
        raise DemoError(f"cannot listen on {_HOST}, port {port}: {error.strerror}") from error
