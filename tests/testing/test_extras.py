import subprocess
import sys

import pytest

import resilient_llm.testing

WITHOUT_EXTRAS = """
import sys
for extra in ("httpx2", "uvicorn", "openai", "anthropic", "trio", "fastapi"):
    sys.modules[extra] = None
from resilient_llm.testing import FakeProvider, run_virtual
import httpx

async def main():
    async with httpx.AsyncClient(transport=FakeProvider().transport(), base_url="http://fake") as http:
        return (await http.post("/v1/chat/completions", json={"model": "m", "messages": []})).status_code

print(run_virtual(main))
try:
    FakeProvider().httpx2_transport()
except ImportError as error:
    print(error)
"""


def test_it_works_without_any_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "200",
        "this transport needs httpx2: pip install 'resilient-llm[httpx2]'",
    ], done.stderr


@pytest.mark.parametrize("name", sorted(set(resilient_llm.testing.__all__) - {"Script"}))
def test_every_public_name_is_there_and_described(name: str) -> None:
    assert getattr(resilient_llm.testing, name).__doc__
