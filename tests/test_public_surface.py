"""What `import resilient_llm` offers, and what it asks of the process that does it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import resilient_llm

# Run in a fresh interpreter that sees the core dependencies and nothing else that is installed. It prints
# what else the library itself asks for, not what a dependency tries for its own sake (httpx looks for rich).
BARE_INSTALL = """
import sys

CORE = {"anyio", "httpx", "opentelemetry", "starlette"}
NEEDED_BY_CORE = {"certifi", "h11", "httpcore", "idna", "sniffio", "typing_extensions"}
EXTRAS = tuple(f"opentelemetry.{part}" for part in ("exporter", "instrumentation", "proto", "sdk"))
INSTALLED = CORE | NEEDED_BY_CORE | sys.stdlib_module_names | {"resilient_llm"}

class OnlyCore:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in INSTALLED and not name.startswith(EXTRAS):
            return None
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("importlib"):
            frame = frame.f_back
        if frame.f_globals["__name__"].startswith("resilient_llm"):
            print(name)
        raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, OnlyCore)
import resilient_llm
"""


def test_all_is_complete_and_names_nothing_twice() -> None:
    public = {name for name in vars(resilient_llm) if not name.startswith("_")}
    submodules = {name for name in public if f"resilient_llm.{name}" in sys.modules}
    assert len(resilient_llm.__all__) == len(set(resilient_llm.__all__))  # the linter keeps them in order
    assert set(resilient_llm.__all__) == (public - submodules) | {"__version__"}


def test_import_needs_only_the_core_dependencies() -> None:
    bare = subprocess.run([sys.executable, "-c", BARE_INSTALL], check=False, capture_output=True, text=True)
    assert bare.stderr == ""
    assert bare.stdout.split() == []


def test_project_requires_exactly_the_core_dependencies() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = [requirement.partition(">=")[0] for requirement in project["dependencies"]]
    assert names == ["anyio", "httpx", "opentelemetry-api", "starlette"]
    assert project["version"] == resilient_llm.__version__
