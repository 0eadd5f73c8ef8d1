"""Pages of documentation as tests: what they show runs, what they link to is there.

A block fenced with `python` is a whole program that asserts what it shows. Other people's code, for comparison,
is fenced with `py`, which looks the same and is not run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Example", "anchors", "examples", "links"]

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A program on a page."""

    page: Path
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def run(self) -> dict[str, object]:
        """Run it, and give the names it defined."""
        names: dict[str, object] = {"__name__": "example"}
        # Blank lines keep the line numbers of tracebacks those of the page.
        exec(compile("\n" * self.line + self.source, str(self.page), "exec", dont_inherit=True), names)
        return names

    def run_apart(self) -> None:
        """Run it in a process of its own, which ends before exporters look for somebody to send to."""
        program = f"{self.source}\nimport os; os._exit(0)"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def examples(page: Path) -> list[Example]:
    """Give the programs on a page, in order."""
    text = page.read_text()
    return [
        Example(page=page, line=text.count("\n", 0, match.start()) + 1, source=match[1])
        for match in _BLOCK.finditer(text)
    ]


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Give the files of this repository that a page links to, each with the anchor in it (or an empty string)."""
    for target in _LINK.findall(_FENCED.sub("", page.read_text())):
        if "://" not in target and not target.startswith("mailto:"):
            file, _, anchor = target.partition("#")
            yield (page.parent / file).resolve() if file else page, anchor


def anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
