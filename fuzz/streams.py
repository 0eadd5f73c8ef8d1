"""Fuzz the framing and reading of streams with atheris: any split of any bytes gives the same, and nothing raises.

scripts/fuzz [seconds]
"""

from __future__ import annotations

import sys
from typing import Any

import atheris

with atheris.instrument_imports(include=["resilient_llm"]):
    from resilient_llm.core.sse import EventTooLargeError, SSEParser
    from resilient_llm.providers import DIALECTS, UNKNOWN, StreamReader

_DIALECTS = (*DIALECTS, UNKNOWN)


def _framed(chunks: list[bytes]) -> object:
    parser = SSEParser(max_event_size=4096)
    events = []
    try:
        for chunk in chunks:
            events += [(event.event, event.data, event.id, event.retry) for event in parser.feed(chunk)]
        events += [(event.event, event.data, event.id, event.retry) for event in parser.close()]
    except EventTooLargeError:
        return "too large"
    return events


def _read(dialect: Any, chunks: list[bytes]) -> object:  # noqa: ANN401 - any dialect
    reader = StreamReader(dialect)
    kinds = [kind for chunk in chunks for kind, _event in reader.feed(chunk)]
    return kinds, reader.close(), reader.answer.finish_reasons


def one(data: bytes) -> None:
    """Read some bytes whole and in pieces, framed and in each dialect."""
    provider = atheris.FuzzedDataProvider(data)
    size = provider.ConsumeIntInRange(1, 64)
    dialect = _DIALECTS[provider.ConsumeIntInRange(0, len(_DIALECTS) - 1)]
    body = provider.ConsumeBytes(sys.maxsize)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert _framed([body]) == _framed(pieces)
    assert _read(dialect, [body]) == _read(dialect, pieces)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
