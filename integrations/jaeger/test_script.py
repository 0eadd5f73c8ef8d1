"""`scripts/jaeger`: where it looks, and what it says when it can do nothing. Nothing is built here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from integrations.jaeger.server import ROOT

SCRIPT = ROOT / "scripts/jaeger"
TOOLS = ("dirname", "mkdir", "mktemp", "mv", "rm", "sed", "tail")


class Machine:
    """A machine with little on it: programs are made up, the cache folder is empty."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.cache = folder / "cache" / "resilient_llm" / "jaeger"
        for tool in TOOLS:
            (self.programs / tool).symlink_to(str(shutil.which(tool)))

    def install(self, name: str, script: str) -> Path:
        program = self.programs / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return program

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", SCRIPT, *arguments],
            env={"PATH": str(self.programs), "XDG_CACHE_HOME": str(self.cache.parents[1])},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("arguments", [(), ("run",)])
def test_without_a_jaeger_and_without_go_it_says_what_to_install(
    machine: Machine, arguments: tuple[str, ...]
) -> None:
    ran = machine.run(*arguments)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("There is no Jaeger here, and no Go (1.24 or newer) to build one with.")
    assert not machine.cache.exists()


def test_looking_for_one_builds_none(machine: Machine) -> None:
    machine.install("go", "exit 3")
    ran = machine.run("find")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", "")


def test_one_on_the_path_is_used_as_it_is(machine: Machine) -> None:
    program = machine.install("jaeger", 'echo "$@"')
    assert machine.run().stdout == machine.run("find").stdout == f"{program}\n"
    ran = machine.run("run", "--set=some.option=1")
    assert ran.stdout == "--config=integrations/jaeger/jaeger.yaml --set=some.option=1\n"
    assert "http://127.0.0.1:16686" in ran.stderr


def test_one_is_built_once(machine: Machine) -> None:
    machine.install(
        "go", 'if [ "$1" = build ]; then printf "#!/bin/sh\\necho built\\n" >"$3"; /bin/chmod +x "$3"; fi'
    )
    ran = machine.run()
    assert ran.returncode == 0, ran.stderr
    program = Path(ran.stdout.strip())
    assert (program.parent, os.access(program, os.X_OK)) == (machine.cache, True)
    machine.install("go", "exit 3")
    assert machine.run().stdout == ran.stdout
    assert machine.run("run").stdout == "built\n"
    assert sorted(path.name for path in machine.cache.iterdir()) == ["build.log", program.name]


def test_a_build_that_fails_leaves_its_log_and_no_program(machine: Machine) -> None:
    machine.install("go", 'if [ "$1" = get ]; then echo "no such module" >&2; exit 1; fi')
    ran = machine.run()
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "no such module" in ran.stderr
    assert [path.name for path in machine.cache.iterdir()] == ["build.log"]


def test_anything_else_is_answered_with_how_to_use_it(machine: Machine) -> None:
    ran = machine.run("start")
    assert ran.returncode == 2
    assert "scripts/jaeger run" in ran.stderr
