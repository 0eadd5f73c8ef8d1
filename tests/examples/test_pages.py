"""Every program on a page runs, every link leads somewhere, every table of options is complete."""

import dataclasses
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest

from resilient_llm import Pipeline, policies
from resilient_llm.httpx import ResilientTransport
from resilient_llm.testing import FakeProvider
from tests.pages import ROOT, Example, anchors, examples, links

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "integrations").glob("*/README.md")),
]
RUN_ELSEWHERE = {"asgi": "tests/asgi/test_docs.py", "telemetry": "tests/telemetry/test_docs.py"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PROGRAMS = [example for page in PAGES if page.stem not in RUN_ELSEWHERE for example in examples(page)]


@pytest.mark.parametrize("example", PROGRAMS, ids=str)
def test_it_runs(example: Example, provider: FakeProvider) -> None:
    if "set_tracer_provider(" in example.source:  # nothing that a test should do to the other ones
        example.run_apart()
    else:
        example.run()


@pytest.mark.parametrize("test", RUN_ELSEWHERE.values())
def test_the_other_programs_run_elsewhere(test: str) -> None:
    assert "test_every_example_runs" in (ROOT / test).read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        assert file.exists(), f"{file.relative_to(ROOT)} is not there"
        assert not anchor or anchor in anchors(file), f"{file.relative_to(ROOT)} has no #{anchor}"


@pytest.mark.parametrize(
    "name", [name for name in policies.__all__ if hasattr(vars(policies)[name], "placement")]
)
def test_a_policy_has_a_page_with_its_options_and_their_defaults(name: str) -> None:
    policy = getattr(policies, name)
    page = re.sub("(?<!^)(?=[A-Z])", "-", name).lower()
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert dict(_rows(_section(text, "Options"))) == {
        field.name: _default(field) for field in dataclasses.fields(policy) if field.init
    }


@pytest.mark.parametrize(
    ("page", "takes_options", "made_by_doors"),
    [("client", ResilientTransport, set()), ("functions", Pipeline, {"handler", "door"})],
)
def test_a_door_has_a_page_with_its_options(page: str, takes_options: type, made_by_doors: set[str]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    names = re.findall(r"^\| `(\w+)`", _section(text, "Options"), re.MULTILINE)
    assert names == [name for name in signature(takes_options).parameters if name not in made_by_doors]


def _section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _rows(table: str) -> Iterator[tuple[str, str]]:
    """Give options and defaults; a row may have several of both, as `min`, `max`."""
    for names, defaults in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", table, re.MULTILINE):
        yield from zip(
            re.findall(r"`(\w+)`", names), re.findall(r"`([^`]+)`", defaults) or [defaults], strict=True
        )


def _default(field: "dataclasses.Field[object]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.default_factory.__name__}()"  # type: ignore[attr-defined]
    if field.default is dataclasses.MISSING:
        return "required"
    if isinstance(field.default, str):
        return f'"{field.default}"'
    number = field.default
    return f"{number:_}" if isinstance(number, int) and not isinstance(number, bool) else repr(number)
