"""A store that was made before a fork, as by a server that loads the application before its workers begin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stores.fork_worker import CHILDREN, MANY, MOST

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
]

ROOT = Path(__file__).parents[2]


def forked(server: Any, what: str) -> dict[str, Any]:
    """Run `fork_worker.py`, since a test's own process has threads and loops that a fork would break."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stores.fork_worker", what, server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("before", ["new", "used"])
def test_children_share_limits_as_processes_that_began_apart(server: Any, before: str) -> None:
    assert forked(server, before) == {"most": MOST, "served": CHILDREN, "ids": CHILDREN + 1}
    with server.admin as admin:
        assert admin.zcard("resilient_llm:{slots:acme}:lease:all") == 0, "each has given back its own"


def test_what_is_to_be_told_is_told_by_the_parent_alone(server: Any) -> None:
    assert forked(server, "kept") == {"kept": 0, "lost": 0}
    with server.admin as admin:
        assert int(admin.get("told")) == MANY
