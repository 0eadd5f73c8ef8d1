"""What a request held is let go of when it has been answered, and not when the garbage collector comes by."""

from __future__ import annotations

import gc

import pytest

from resilient_llm.call import Call
from resilient_llm.testing import FakeProvider, Fault
from tests.sidecar.support import ASK, ask, memory

pytestmark = pytest.mark.anyio

_OPEN = """
[targets.main]
url = "http://provider.example/v1"
"""


def calls() -> int:
    """Count the calls and attempts there are, those among them that wait for the collector."""
    return sum(isinstance(one, Call) for one in gc.get_objects())


@pytest.mark.parametrize("retry", ["enabled = false", "max_attempts = 3"])
async def test_an_answered_request_leaves_nothing_to_the_garbage_collector(retry: str) -> None:
    sidecar = memory(FakeProvider(), f"{_OPEN}[retry]\n{retry}\n")
    assert (await ask(sidecar)).status == 200  # whatever is made once
    gc.collect()
    gc.disable()
    try:
        before = calls()
        for _ in range(5):
            assert (await ask(sidecar)).status == 200
        assert calls() == before
    finally:
        gc.enable()


async def test_a_call_that_is_tried_again_knows_its_prompt_after_its_first_attempt_is_gone() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    toml = """
[targets.main]
url = "http://provider.example/v1"
context_window = 100_000
[targets.other]
url = "http://other.example/v1"
context_window = 100_000
[retry]
max_attempts = 3
"""
    assert (await ask(memory(provider, toml), ASK)).status == 200
    assert len(provider.requests) == 2
