"""What tests start does not outlive them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores.cluster import wait_for

STARTS_AND_HANGS = """
import subprocess, sys, time
from benchmarks._children import Watch
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
watch = Watch(child, group=sys.argv[1] == "group")
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["process", "group"])
def test_a_child_ends_with_a_killed_parent(what: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS_AND_HANGS, what],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for(lambda: not runs(child), "the child's end")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
