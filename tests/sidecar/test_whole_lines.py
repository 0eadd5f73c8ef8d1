"""Lines of several processes in one pipe, or file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resilient_llm.sidecar.whole_lines import WholeLines

WRITER = """
import sys
from resilient_llm.sidecar.whole_lines import WholeLines
out = WholeLines(1)
for number in range(200):
    out.write("".join(sys.argv[1] * (50 + 7 * (number + line) % 900) + "\\n" for line in range(40)))
"""


@pytest.mark.realtime
def test_lines_of_several_processes_stay_whole() -> None:
    receive, send = os.pipe()
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, letter], stdout=send) for letter in "abc"]
    os.close(send)
    with os.fdopen(receive) as lines:
        seen = [(line[0], set(line.rstrip("\n"))) for line in lines]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(seen) == 3 * 200 * 40
    assert all(letters == {letter} for letter, letters in seen)


@pytest.mark.realtime
def test_lines_of_several_processes_stay_whole_in_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, letter], stdout=output) for letter in "abc"
        ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = log.read_text().splitlines()
    assert len(lines) == 3 * 200 * 40
    assert all(len(set(line)) == 1 for line in lines)


def test_a_line_that_is_longer_than_a_piece_is_written_all_the_same() -> None:
    receive, send = os.pipe()
    read: list[str] = []

    def reading() -> None:
        with os.fdopen(receive) as lines:
            read.extend(lines)

    reader = threading.Thread(target=reading)
    reader.start()
    out = WholeLines(send)
    assert out.write("x" * 200_000 + "\né\n") == 200_003
    out.flush()
    os.close(send)
    reader.join(60)
    assert read == ["x" * 200_000 + "\n", "é\n"]
