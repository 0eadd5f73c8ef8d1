"""`stream.max_event_size` of the file is that of the policy that passes streams on."""

from __future__ import annotations

from resilient_llm import Stream
from resilient_llm.sidecar import parse
from resilient_llm.sidecar.call_policies import replays

TARGET = '[targets.main]\nurl = "http://localhost:8000/v1"\n'


def size_by(text: str) -> int:
    (stream,) = [policy for policy in replays(parse(TARGET + text)) if isinstance(policy, Stream)]
    return stream.max_event_size


def test_the_file_says_how_large_an_event_may_be() -> None:
    assert size_by("[stream]\nmax_event_size = 1000") == 1000
    assert size_by("") == Stream().max_event_size == 64 * 1024 * 1024
