"""Lines of several processes in one pipe, or file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resilient_llm.sidecar.whole_lines import LinesLostError, WholeLines

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


class Disk:
    """Takes so many bytes more, and then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 0
        self.written = b""
        monkeypatch.setattr(os, "write", self.write)

    def write(self, _fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        self.written += taken
        return len(taken)


@pytest.mark.parametrize(
    ("room", "lost", "left"),
    [(0, 3, b""), (2, 3, b"aa"), (3, 2, b"aa\n"), (4, 2, b"aa\nb"), (8, 1, b"aa\nbb\ncc")],
)
def test_a_line_that_is_torn_takes_no_other_with_it(
    room: int, lost: int, left: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("wb") as file:
        disk = Disk(monkeypatch)
        out = WholeLines(file.fileno())
        disk.room = room
        for _ in range(2):  # the second time there is no room at all
            with pytest.raises(LinesLostError) as raised:
                out.write("aa\nbb\ncc\n")
            assert raised.value.errno == errno.ENOSPC
            assert raised.value.lines == lost
            lost = 3
        disk.room = 100
        out.write("dd\n")
        monkeypatch.undo()
    end = b"" if left.endswith(b"\n") or not left else b"\n"
    assert disk.written == left + end + b"dd\n"
