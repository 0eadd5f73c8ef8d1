"""Every example is a short program that prints what its docstring says."""

import runpy
import textwrap
from pathlib import Path

import pytest

from tests.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_prints_what_it_says(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(example), run_name="__main__")
    _, said, promised = names["__doc__"].partition("\nPrints:\n")
    assert said, "the docstring of an example ends with what it prints"
    assert capsys.readouterr().out == textwrap.dedent(promised)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 8
