"""A Prometheus that scrapes a sidecar and a service with the library, as prometheus.yml says, while both are in use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx
import yaml

from integrations.prometheus.app import create_app
from integrations.prometheus.server import Prometheus, program, running
from integrations.prometheus.traffic import TOKEN, flowing
from resilient_llm.testing import FakeProvider, serve_in_thread

__all__ = ["FOLDER", "configured", "scraped"]

FOLDER: Final = Path(__file__).parent


@contextmanager
def scraped(folder: Path) -> Iterator[Prometheus]:
    """Run all of it, have everything happen twice, lose the store, and wait until Prometheus has seen it."""
    program("prometheus")  # skips before anything is started
    with ExitStack() as stack:
        traffic = stack.enter_context(flowing(folder))
        with patch.dict(os.environ, OPENAI_API_KEY="none"):
            app = create_app(FakeProvider().httpx2_transport())
        service = stack.enter_context(serve_in_thread(app))
        targets = {"resilient-llm": traffic.admin, "chat": service}
        prometheus = stack.enter_context(running(configured(folder, targets)))
        up = dict.fromkeys(targets, "up")

        def wait_for(series: str, least: float) -> None:
            prometheus.wait_for(
                lambda: [float(each["value"][1]) for each in prometheus.query(series)],
                lambda values: bool(values) and max(values) >= least,
            )

        for round_ in (1, 2):
            traffic.round()
            _ask(service)
            prometheus.wait_for(prometheus.targets, up.__eq__)
            # Only what is counted between two samples has a rate; these are the last things of a round.
            wait_for("sum(resilient_llm_rejections_total)", 1)
            wait_for('sum(gen_ai_client_operation_duration_seconds_count{job="chat"})', 3 * round_)
        traffic.lose_the_store()
        wait_for("resilient_llm_store_state", 1)
        wait_for("job_model:resilient_llm_failures:ratio_rate5m", 0.05)
        yield prometheus


def configured(folder: Path, targets: dict[str, str]) -> Path:
    """Write prometheus.yml with other targets, those jobs alone, and little time between scrapes."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] in targets]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]].removeprefix("http://")]}]
    (folder / "gateway-token").write_text(TOKEN)
    shutil.copy(FOLDER / "rules.yml", folder)
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def _ask(service: str) -> None:
    for tenant in ("acme", "umbrella", "somebody"):
        answer = httpx.post(
            f"{service}/chat", json={"message": "?"}, headers={"x-tenant": tenant}, timeout=30
        )
        assert answer.status_code == 200, answer.text
