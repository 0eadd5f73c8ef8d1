"""Lines of the log are written together and in order, soon, and none is lost."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.sidecar.access_log import Entry, JSONFormatter
from resilient_llm.sidecar.log_lines import LineHandler


class Counted(io.StringIO):
    """A stream that counts how often it is written to."""

    writes = 0

    def write(self, text: str, /) -> int:
        self.writes += 1
        return super().write(text)


def handler_of(stream: io.StringIO, *, delay: float = 0.01) -> tuple[logging.Logger, LineHandler]:
    handler = LineHandler(stream, delay=delay)
    logger = logging.Logger("lines", logging.INFO)  # noqa: LOG001 - of no tree
    logger.addHandler(handler)
    return logger, handler


@pytest.mark.realtime
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_they_are_written_together_soon() -> None:
    stream = Counted()
    logger, handler = handler_of(stream)
    for number in range(100):
        logger.info("line %d", number)
    assert stream.getvalue() == ""
    async with asyncio.timeout(10):
        while not stream.getvalue():  # noqa: ASYNC110 - a stream tells nobody
            await asyncio.sleep(0.005)
    assert stream.getvalue().splitlines() == [f"line {number}" for number in range(100)]
    assert stream.writes == 1
    logger.info("another")
    async with asyncio.timeout(10):
        while stream.writes < 2:  # noqa: ASYNC110 - a stream tells nobody
            await asyncio.sleep(0.005)
    handler.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_warning_takes_with_it_what_came_before() -> None:
    stream = io.StringIO()
    logger, _ = handler_of(stream, delay=600)
    logger.info("first")
    logger.warning("second")
    assert stream.getvalue() == "first\nsecond\n"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_are_not_kept() -> None:
    stream = io.StringIO()
    logger, _ = handler_of(stream, delay=600)
    for _ in range(80):
        logger.info("x" * 1024)
    assert len(stream.getvalue()) > 65_536


def test_without_an_event_loop_each_is_written_at_once() -> None:
    stream = io.StringIO()
    logger, _ = handler_of(stream, delay=600)
    logger.info("now")
    assert stream.getvalue() == "now\n"


def test_what_a_loop_that_has_ended_would_have_written_is_not_lost() -> None:
    stream = io.StringIO()
    logger, handler = handler_of(stream, delay=600)

    async def main() -> None:
        logger.info("in one loop")

    asyncio.run(main())
    assert stream.getvalue() == ""
    asyncio.run(main())
    logger.info("outside")
    handler.flush()
    assert stream.getvalue() == "in one loop\nin one loop\noutside\n"


@pytest.mark.realtime
def test_at_the_end_of_the_process_everything_is_written() -> None:
    program = """
import asyncio, logging
from resilient_llm.sidecar.server import configure_logging
configure_logging()
async def main():
    logging.getLogger("resilient_llm").info("the last word")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert [json.loads(line)["message"] for line in done.stdout.splitlines()] == ["the last word"]


@pytest.mark.parametrize(
    ("created", "time"),
    [
        (0.0, "1970-01-01T00:00:00.000+00:00"),
        (1_790_000_000.9999, "2026-09-21T14:13:20.999+00:00"),
        (1_790_000_001.25, "2026-09-21T14:13:21.250+00:00"),
    ],
)
def test_the_time_is_that_of_the_record(created: float, time: str) -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "message", None, None)
    record.created = created
    assert json.loads(JSONFormatter().format(record))["time"] == time


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
)


@given(st.dictionaries(st.text(), _VALUES, min_size=1, max_size=8))
def test_an_entry_is_written_as_json_writes_it(fields: dict[str, object]) -> None:
    written: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.fields = fields  # as a filter may do, to say more
            written.append(JSONFormatter().format(record))

    logger, handler = logging.getLogger("resilient_llm.access"), Collect()
    level, logger.disabled = logger.level, False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        Entry("POST", {}, lambda: 0.0).write()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (line,) = written
    assert line.isascii()
    assert line.isprintable()
    assert line.endswith(f"{json.dumps(fields)[1:]}")
    assert json.loads(line)["logger"] == fields.get("logger", "resilient_llm.access")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_entries_are_put_into_words_in_their_order_and_one_that_cannot_be_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unspeakable:
        def __str__(self) -> str:
            raise RuntimeError

    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream = io.StringIO()
    logger, handler = handler_of(stream, delay=600)
    handler.setFormatter(JSONFormatter())
    for number, value in enumerate((1, Unspeakable(), 3)):
        logger.info("request", extra={"fields": {"number": number, "value": value}})
        logger.info("line %d", number)
    assert stream.getvalue() == ""
    handler.flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["message"], line.get("number")) for line in lines] == [
        ("request", 0),
        ("line 0", None),
        ("line 1", None),
        ("request", 2),
        ("line 2", None),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_entries_are_not_kept() -> None:
    stream = io.StringIO()
    logger, handler = handler_of(stream, delay=600)
    handler.setFormatter(JSONFormatter())
    for number in range(1000):
        logger.info("request", extra={"fields": {"number": number}})
    assert len(stream.getvalue().splitlines()) > 500
