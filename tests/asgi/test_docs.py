"""Every example on the page about the ASGI door runs."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

PAGE = Path(__file__).parents[2] / "docs" / "asgi.md"
EXAMPLES = [
    match[1] for match in re.finditer(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_runs(source: str) -> None:
    exec(compile(source, str(PAGE), "exec"), {"__name__": "example"})


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) == 3


def test_the_first_example_answers() -> None:
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(EXAMPLES[0], str(PAGE), "exec"), names)
    client = TestClient(names["app"])  # type: ignore[arg-type]
    assert client.post("/chat", json={"question": "why?"}, headers={"x-tenant-id": "a"}).json() == {
        "answer": "WHY?"
    }
    assert client.post("/chat", json={"question": "why?"}).status_code == 401
