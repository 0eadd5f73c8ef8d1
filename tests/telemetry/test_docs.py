"""What the page about telemetry says is so."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from resilient_llm.telemetry import names
from tests.pages import ROOT, examples

PATH = ROOT / "docs" / "telemetry.md"
PAGE = PATH.read_text()
EXAMPLES = [example.source for example in examples(PATH)]


@pytest.mark.parametrize("source", EXAMPLES, ids=["the SDK", "labels", "redaction", "a listener"])
def test_every_example_runs(source: str) -> None:
    source += "\nimport os; os._exit(0)"  # nobody listens where the exporters would send
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "secret", ["?key=CANARY", "?a=b&key=CANARY&c=d", "?sig=CANARY", "?api_key=CANARY", "?token=CANARY"]
)
def test_redaction_redacts(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    defined: dict[str, type[logging.Filter]] = {}
    exec(EXAMPLES[2].partition("for library")[0], defined)
    logger = logging.getLogger("httpx of this test")
    logger.addFilter(defined["Redact"]())
    with caplog.at_level(logging.INFO):
        logger.info(
            'HTTP Request: %s %s "%s"', "POST", f"https://user:CANARY@host.example/v1{secret}", "200 OK"
        )
    assert "CANARY" not in caplog.text
    assert "host.example/v1" in caplog.text


def test_the_page_names_everything() -> None:
    def written(name: str) -> bool:
        short = name.removeprefix("resilient_llm.")
        group, _, last = short.rpartition(".")
        return any(f"`{form}`" in PAGE for form in (name, short, f"resilient_llm.{short}")) or (
            f"`.{last}`" in PAGE and f"{group}." in PAGE
        )

    everything = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
    assert len(everything) > 50
    assert [name for name in everything if not written(name)] == []
