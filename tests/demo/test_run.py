"""What ends a run of the demo badly, without the fifteen seconds."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from resilient_llm.demo import run
from resilient_llm.demo.figures import Figures
from resilient_llm.demo.run import DemoError, Settings, run_demo
from tests.demo.collecting import collecting
from tests.demo.test_figures import FIGURES


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console, and a demo that records one span instead of calling anybody."""

    async def measure(demo: run._Demo, *_: object) -> Figures:
        demo._recorded.tracer_provider.get_tracer("tests").start_span("a").end()
        return FIGURES

    monkeypatch.setattr(run._Demo, "_measure", measure)
    return Console(file=StringIO(), width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_all_is_shown(console: Console) -> None:
    run_demo(Settings(), console)
    assert "Not shown" not in printed(console)


def test_something_is_not_shown(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figures, "shortfalls", lambda _: ["pigs fly, but they did not"])
    with pytest.raises(DemoError, match="did not show what the demo is there to show"):
        run_demo(Settings(), console)
    assert "Not shown: pigs fly, but they did not." in printed(console)


def test_the_collector_goes_away(console: Console) -> None:
    with (
        collecting(200, 400) as (url, _),
        pytest.raises(DemoError, match=f"the collector at {url} stopped answering"),
    ):
        run_demo(Settings(otlp=url), console)
    assert f"0 spans, and metrics, were sent to {url}; 1 were lost" in printed(console)


def test_the_sdk_is_disabled(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(DemoError, match="OTEL_SDK_DISABLED is set"):
        run_demo(Settings(), console)
    assert printed(console) == ""
