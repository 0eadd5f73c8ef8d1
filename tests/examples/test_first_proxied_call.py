"""The README's way to a first proxied call works as it stands, but for the ports, which may be taken."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.stores.conftest import free_port

PAGE = (ROOT / "README.md").read_text()
SECTION = PAGE.partition("\n## As a proxy, for services in any language\n")[2].partition("\n## ")[0]
INSTALL, *COMMANDS = re.findall(r"^```sh\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)


def run(script: str, folder: Path) -> tuple[int, str, str]:
    """Run commands, one after the other; nothing that they started is left. Give how they end, and what they print."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail"],
        cwd=folder,
        env={**os.environ, "PATH": path, "no_proxy": "*"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = shell.communicate(script, timeout=180)
    finally:
        try:
            os.killpg(shell.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        else:
            shell.communicate()
    return shell.returncode, out, err


def with_free_ports(script: str) -> str:
    """Put ports that are free now in the place of those of the page."""
    for port in ("9000", "8080", "8081"):
        assert port in script
        script = script.replace(port, str(free_port()))
    return script


@pytest.mark.realtime
@pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("bash") is None, reason="there is no curl or bash"
)
def test_its_commands_work(tmp_path: Path) -> None:
    for _ in range(3):
        code, printed, complaints = run(with_free_ports("".join(COMMANDS)) + "wait\n", tmp_path)
        if "Address already in use" not in complaints:  # somebody else took one meanwhile
            break
    assert code == 0, complaints
    assert "gateway.toml: OK" in printed
    assert "The quick brown fox jumps over the lazy dog." in printed
    assert re.findall(r'"message": "request".*"attempts": (\d+)', printed) == ["2"]
    steps = re.findall(r"^\d+ ms (\w+) ", printed, re.MULTILINE)
    assert [step for step in steps if step != "route"] == ["attempt", "backoff", "attempt"]


def test_what_it_installs_is_there() -> None:
    [extras] = re.findall(r"pip install '\.\[([a-z,]+)\]'", INSTALL)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
