"""Whoever logs never waits for whoever reads the log, and what is left out is counted."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from resilient_llm.sidecar.log_writer import LogWriter
from resilient_llm.sidecar.whole_lines import LinesLostError
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.sidecar.process import PORTS
from tests.sidecar.support import ASK

LINE = "x" * 99 + "\n"


class Stuck:
    """A reader that takes nothing until it is let on."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.asked = threading.Event()
        self.written: list[str] = []

    def write(self, text: str, /) -> None:
        self.asked.set()
        self.going.wait(60)
        self.written.append(text)


def lost(count: int) -> str:
    return f"{count} left out\n"


def test_everything_is_written_in_its_order() -> None:
    stuck = Stuck()
    stuck.going.set()
    out = LogWriter(stuck, lost=lost, patience=60)
    for number in range(1000):
        out.write(f"{number}\n")
    out.flush()
    assert "".join(stuck.written).split() == [str(number) for number in range(1000)]


def test_what_is_not_taken_is_left_out_and_counted_once_there_is_room() -> None:
    stuck = Stuck()
    out = LogWriter(stuck, lost=lost, most=10 * len(LINE), patience=60)
    for _ in range(25):
        out.write(LINE)  # would hang here for ever
    stuck.going.set()
    out.flush()
    assert stuck.written == [LINE] * 10 + ["15 left out\n"]
    out.write("more\n")
    out.flush()
    assert stuck.written[-1] == "more\n"


def test_what_cannot_be_written_is_counted_and_told_before_the_next_that_can() -> None:
    class Full:
        def __init__(self) -> None:
            self.written: list[str] = []
            self.full = True

        def write(self, text: str, /) -> None:
            if self.full:
                raise LinesLostError(text.count("\n"), OSError(errno.ENOSPC, "No space left on device"))
            self.written.append(text)

    disk = Full()
    out = LogWriter(disk, lost=lost, patience=60)
    for _ in range(3):
        out.write(2 * LINE)
        out.flush()
    disk.full = False
    out.write("more\n")
    out.write("and more\n")
    out.flush()
    assert "".join(disk.written) == "6 left out\nmore\nand more\n"


def test_a_piece_larger_than_all_that_may_wait_passes_alone() -> None:
    stuck = Stuck()
    stuck.going.set()
    out = LogWriter(stuck, lost=lost, most=10, patience=60)
    out.write(LINE)
    out.flush()
    assert stuck.written == [LINE]


def test_flushing_has_an_end() -> None:
    stuck = Stuck()
    out = LogWriter(stuck, lost=lost, patience=0.05)
    out.write(LINE)
    out.flush()
    assert stuck.written == []
    stuck.going.set()


def test_that_nobody_reads_any_more_ends_nothing() -> None:
    class Closed:
        tries = 0

        def write(self, _text: str, /) -> None:
            self.tries += 1
            raise BrokenPipeError

    closed = Closed()
    out = LogWriter(closed, lost=lost, patience=60)
    out.write(LINE)
    out.flush()
    out.write(LINE)
    out.flush()
    assert closed.tries == 2


@pytest.mark.realtime
def test_a_sidecar_whose_log_nobody_reads_answers_and_ends(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    with serve_in_thread(FakeProvider()) as upstream:
        file.write_text(f'{PORTS.replace("= 50", "= 1")}[targets.one]\nurl = "{upstream}/v1"\n')
        process = subprocess.Popen(
            [sys.executable, "-m", "resilient_llm.cli", "serve", "--config", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            with httpx.Client(timeout=60) as client:
                for _ in range(400):  # some 140 lines fill a pipe
                    assert client.post(f"{url}/v1/chat/completions", json=ASK).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()
