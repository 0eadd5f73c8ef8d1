"""The command line: its help, its versions, and one line instead of a traceback for every mistake."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import resilient_llm
from resilient_llm.cli.program import program, run
from tests.cli.conftest import ROOT

# Runs the command line where the packages named first are not installed.
WITHOUT = """
import sys

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing, sys.argv = sys.argv[1].split(","), ["resilient-llm", *sys.argv[2:]]
sys.meta_path.insert(0, Missing)
from resilient_llm.cli import main
main()
"""


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(program, arguments, prog_name="resilient-llm")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def run_without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, missing, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def test_version() -> None:
    assert invoke("--version").output == f"resilient-llm {resilient_llm.__version__}\n"


def test_help_names_the_commands_and_shows_examples() -> None:
    for arguments in ([], ["-h"], ["--help"]):
        output = invoke(*arguments).output
        assert "  demo           Show the policies at work" in output
        assert "  fake-provider  Serve a provider" in output
        assert "\n    resilient-llm fake-provider --port 8001 --faults flaky --latency 0.2\n" in output


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", ["--duration", "--seed", "--otlp", "--serve", "--port", "--plain", "--json"]),
        (
            "fake-provider",
            ["--host", "--port", "--faults", "--latency", "--token-latency", "--rpm", "--tpm", "--seed"],
        ),
    ],
)
def test_help_of_a_command_explains_every_option(command: str, options: list[str]) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  --")]
    assert listed == options
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["dmo"], "No such command 'dmo'. Did you mean 'demo'?"),
        (["demo", "--duration", "1"], "1.0 is not in the range 2<=x<=3600"),
        (["demo", "--duration", "nan"], "nan is not a finite number"),
        (["demo", "--port", "70000"], "70000 is not in the range 0<=x<=65535"),
        (["demo", "--otlp", "localhost:4318"], "'localhost:4318' is not a URL such as http://localhost:4318"),
        (["demo", "--otlp", "http://"], "'http://' is not a URL"),
        (["demo", "--otlp", "http://[::1"], "'http://[::1' is not a URL"),
        (["demo", "--otlp", "http://localhost:port"], "'http://localhost:port' is not a URL"),
        (["fake-provider", "--latency", "inf"], "inf is not a finite number"),
        (["fake-provider", "--rpm", "0"], "0.0 is not in the range x>0"),
        (
            ["fake-provider", "--faults", "bad-weather"],
            "'bad-weather' is neither a file nor one of none, flaky",
        ),
    ],
)
def test_wrong_usage(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stdout == ""


def test_run_gives_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert run(["demo", "--duration", "soon"]) == 2
    assert "'soon' is not a valid float" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "fake-provider"])
def test_port_in_use(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke(command, "--port", str(port))
    assert result.exit_code == 1
    assert result.stderr == f"Error: cannot listen on 127.0.0.1, port {port}: Address already in use\n"


def test_serve_without_standard_output_says_that_its_log_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[targets.one]\nurl = "http://one.example/v1"\n')
    shell = 'exec "$0" -m resilient_llm.cli serve --config "$1" >&-'
    ended = subprocess.run(
        ["sh", "-c", shell, sys.executable, str(file)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: standard output is closed")


def test_address_of_another_machine() -> None:
    result = invoke("fake-provider", "--host", "192.0.2.1")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: cannot listen on 192.0.2.1, port 8000: ")


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("click", "demo", "cli"),
        ("uvicorn", "fake-provider", "cli"),
        ("fastapi", "demo", "demo"),
        ("httpx2", "demo", "demo"),
    ],
)
def test_missing_extra_is_named(missing: str, command: str, extra: str) -> None:
    result = run_without(missing, command)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert f" needs {missing}" in line
    assert line.endswith(f"pip install 'resilient-llm[{extra}]'")


def test_missing_opentelemetry_sdk_is_named() -> None:
    # The API and the SDK share a namespace package, so a module of it is what is missing.
    script = WITHOUT.replace('name.partition(".")[0] in missing', 'name.startswith("opentelemetry.sdk")')
    command = [sys.executable, "-c", script, "-", "demo"]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs opentelemetry.sdk" in result.stderr
    assert "resilient-llm[demo]" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_starts_a_sidecar_imports_nothing_of_the_other_commands() -> None:
    program = """
import sys
from resilient_llm.cli.program import program
try:
    program(["serve", "--config", "there-is-none.toml"])
except SystemExit:
    print(sorted(name for name in sys.modules if name.startswith(("resilient_llm.testing", "httpx", "rich"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"
