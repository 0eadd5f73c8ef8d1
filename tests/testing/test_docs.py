from tests.pages import ROOT, examples


def test_the_page_has_examples() -> None:
    """`tests/examples/test_pages.py` runs them."""
    assert len(examples(ROOT / "docs" / "testing.md")) >= 8
