"""How long `import resilient_llm` takes beyond importing its four dependencies.

Fresh interpreters import the one and the other in turn; the last line is a JSON object of medians in seconds.
"""

import argparse
import json
import statistics
import subprocess
import sys

DEPENDENCIES = "anyio, httpx, opentelemetry.metrics, opentelemetry.trace, starlette"
TIMED_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def import_time(modules: str) -> float:
    """Return the seconds that a fresh interpreter takes to import `modules`."""
    command = [sys.executable, "-c", TIMED_IMPORT.format(modules)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="take 51 pairs of measurements instead of 11")
    pairs = 51 if parser.parse_args().full else 11
    for modules in (DEPENDENCIES, "resilient_llm"):
        import_time(modules)  # the first import compiles and fills the file cache
    times = [(import_time(DEPENDENCIES), import_time("resilient_llm")) for _ in range(pairs)]
    dependencies = statistics.median(dependencies for dependencies, _ in times)
    library = statistics.median(library for _, library in times)
    added = statistics.median(library - dependencies for dependencies, library in times)
    figures = {"import_s": library, "dependencies_s": dependencies, "added_s": added}
    print(json.dumps({name: round(figure, 4) for name, figure in figures.items()}))


if __name__ == "__main__":
    main()
