"""One trace as a tree in the terminal: who waited, what was tried, how long it took and what came of it.

Only how finished spans are drawn, and which of many traces is worth drawing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_trace_id
from opentelemetry.util.types import AttributeValue
from rich.table import Table
from rich.text import Text

from resilient_llm.demo.figures import seconds_of
from resilient_llm.demo.layout import duration
from resilient_llm.telemetry import names

__all__ = ["TraceNode", "draw", "most_interesting", "trees"]

_TIMELINE = (10, 40)  # columns at least and at most
_BESIDE_TIMELINE = 69  # columns for names, durations and notes


@dataclass(slots=True)
class TraceNode:
    """A span and the spans below it, in the order they began."""

    span: ReadableSpan
    children: list[TraceNode] = field(default_factory=list)

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        """The span's."""
        return self.span.attributes or {}

    @property
    def trace_id(self) -> str:
        """The trace's id, as viewers show it."""
        return format_trace_id(self.span.context.trace_id)

    def walk(self) -> Iterator[TraceNode]:
        """Give this node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def most_interesting(spans: Iterable[ReadableSpan]) -> TraceNode | None:
    """Choose the call that ended well after going wrong in the most different ways, and most often."""
    candidates = [root for root in trees(spans) if root.attributes.get(names.STATUS_CODE) == 200]
    return max(candidates, key=_interest, default=None)


def trees(spans: Iterable[ReadableSpan]) -> list[TraceNode]:
    """Put finished spans under their parents; gives the roots in the order they began."""
    nodes = {span.context.span_id: TraceNode(span) for span in spans}
    roots: list[TraceNode] = []
    for node in sorted(nodes.values(), key=lambda node: node.span.start_time or 0):
        parent = node.span.parent and nodes.get(node.span.parent.span_id)
        (parent.children if parent else roots).append(node)
    return roots


def _interest(root: TraceNode) -> tuple[int, int]:
    attempts = sum(names.ATTEMPT_NUMBER in node.attributes for node in root.walk())
    seen: defaultdict[str, set[AttributeValue]] = defaultdict(set)
    for node in root.walk():
        for name in (names.ERROR_TYPE, names.BACKOFF_SOURCE, names.WAIT_OUTCOME):
            if name in node.attributes:
                seen[name].add(node.attributes[name])
    return sum(map(len, seen.values())), attempts


def draw(root: TraceNode, width: int) -> Table:
    """Draw a tree for a terminal of so many columns."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    least, most = _TIMELINE
    columns = min(most, max(least, width - _BESIDE_TIMELINE))
    for guides, node in _with_guides(root):
        style = _style(node)
        name = Text.assemble((guides, "dim"), (node.span.name, f"bold {style}" if not guides else style))
        table.add_row(
            name,
            duration(seconds_of(node.span)),
            Text(_bar(node.span, root.span, columns), style),
            _notes(node),
        )
    return table


def _with_guides(node: TraceNode, guide: str = "", indent: str = "") -> Iterator[tuple[str, TraceNode]]:
    yield guide, node
    for child in node.children:
        last = child is node.children[-1]
        yield from _with_guides(child, indent + ("└ " if last else "├ "), indent + ("  " if last else "│ "))


def _bar(span: ReadableSpan, root: ReadableSpan, columns: int) -> str:
    """Draw when a span began and ended, on the root's time."""
    per_column = seconds_of(root) / columns
    began = ((span.start_time or 0) - (root.start_time or 0)) / 1e9
    start = min(columns - 1, round(began / per_column))
    end = max(start + 1, min(columns, round((began + seconds_of(span)) / per_column)))
    return " " * start + "━" * (end - start)


def _style(node: TraceNode) -> str:
    if names.ERROR_TYPE in node.attributes:
        return "red"
    if names.BACKOFF_SOURCE in node.attributes or names.WAIT_OUTCOME in node.attributes:
        return "yellow"
    return "green"


def _notes(node: TraceNode) -> str:
    """Say what a span's attributes say, without the prefix `resilient_llm.`."""
    said = {name: str(value) for name, value in node.attributes.items()}
    mark = "✗ " if names.ERROR_TYPE in said else "✓ "
    if names.ATTEMPT_NUMBER in said:
        result = said.get(names.STATUS_CODE) or said.get(names.ERROR_TYPE) or said[names.ATTEMPT_OUTCOME]
        hint = said.get(names.ATTEMPT_RETRY_AFTER)
        return f"{mark}number={said[names.ATTEMPT_NUMBER]} {result}" + (
            f" retry_after={hint}" if hint else ""
        )
    if names.OUTCOME in said:
        return f"{mark}{said[names.OUTCOME]} attempts={said[names.ATTEMPTS]} retries={said[names.RETRIES]}"
    if names.BACKOFF_SOURCE in said:
        return f"  source={said[names.BACKOFF_SOURCE]}"
    if names.WAIT_OUTCOME in said:
        return f"  {said[names.WAIT_OUTCOME]} queue_depth={said[names.WAIT_QUEUE_DEPTH]}"
    return f"{mark}{said.get(names.STATUS_CODE, '')} tenant={said.get(names.TENANT, '')}"
