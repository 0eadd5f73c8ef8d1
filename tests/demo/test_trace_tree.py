"""The trace in the terminal: which one is chosen, and how it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from rich.console import Console

from resilient_llm.demo.trace_tree import draw, most_interesting
from tests.demo.spans import Attributes, Trace

ERRORS: Mapping[str, Attributes] = {
    "429": {"http.response.status_code": 429, "resilient_llm.attempt.retry_after": 1.0},
    "read_error": {},
}


def request(trace: Trace, *errors: str, status: int = 200, wait: float = 0.0, tenant: str = "amber") -> None:
    with trace.span("POST /chat", {"resilient_llm.tenant": tenant}, kind=SpanKind.SERVER) as server:
        if wait:
            waited: Attributes = {
                "resilient_llm.wait.outcome": "acquired",
                "resilient_llm.wait.queue_depth": 3,
            }
            with trace.span("wait bulkhead", waited):
                trace.now += wait
        with trace.span("chat m", {}) as call:
            for number, error in enumerate(errors, 1):
                failed: Attributes = {
                    "resilient_llm.attempt.number": number,
                    "error.type": error,
                    **ERRORS[error],
                }
                with trace.span("attempt openai/m", failed):
                    trace.now += 0.1
                source = "retry_after" if error == "429" else "exponential"
                with trace.span("backoff", {"resilient_llm.backoff.source": source}):
                    trace.now += 1.0 if error == "429" else 0.1
            number = len(errors) + 1
            with trace.span("attempt openai/m", {"resilient_llm.attempt.number": number}) as attempt:
                attempt.set_attribute("http.response.status_code", 200)
                trace.now += 0.2
            call.set_attribute("resilient_llm.outcome", "success")
            call.set_attribute("resilient_llm.attempts", number)
            call.set_attribute("resilient_llm.retries", number - 1)
        server.set_attribute("http.response.status_code", status)


def drawn(spans: Sequence[ReadableSpan], width: int) -> list[str]:
    root = most_interesting(spans)
    assert root is not None
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(draw(root, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_call_that_waited_was_throttled_and_was_cut_off() -> None:
    trace = Trace()
    request(trace, "429", "read_error", wait=0.4)
    assert drawn(trace.spans, 80) == [
        "POST /chat           1.90 s ━━━━━━━━━━━ ✓ 200 tenant=amber",
        "├ wait bulkhead      400 ms ━━            acquired queue_depth=3",
        "└ chat m             1.50 s   ━━━━━━━━━ ✓ success attempts=3 retries=2",
        "  ├ attempt openai/m 100 ms   ━         ✗ number=1 429 retry_after=1.0",
        "  ├ backoff          1.00 s    ━━━━━━     source=retry_after",
        "  ├ attempt openai/m 100 ms          ━  ✗ number=2 read_error",
        "  ├ backoff          100 ms          ━    source=exponential",
        "  └ attempt openai/m 200 ms           ━ ✓ number=3 200",
    ]


def test_a_wider_terminal_gives_the_time_more_room_and_no_line_is_cut() -> None:
    trace = Trace()
    request(trace, "429", wait=0.4, tenant="x" * 60)
    narrow, wide = drawn(trace.spans, 80), drawn(trace.spans, 120)
    assert max(line.count("━") for line in wide) == 40
    assert max(len(line) for line in narrow) <= 80
    assert "".join(narrow).replace(" ", "").count("x") == 60


def test_the_call_with_the_most_different_troubles_is_chosen() -> None:
    trace = Trace()
    request(trace)
    request(trace, "429", "429", wait=1.0, tenant="twice the same")
    request(trace, "429", "read_error", wait=1.0, tenant="as many, but once each")
    request(trace, "429", "read_error", "429", wait=1.0, tenant="chosen")
    request(trace, "429", "read_error", "429", wait=1.0, tenant="the same but later")
    request(trace, "429", "read_error", wait=1.0, status=503, tenant="ended badly")
    root = most_interesting(trace.spans)
    assert root is not None
    assert root.attributes["resilient_llm.tenant"] == "chosen"
    assert len(root.trace_id) == 32


def test_no_trace_of_a_call_that_was_served() -> None:
    trace = Trace()
    request(trace, status=429)
    assert most_interesting(trace.spans) is None
    assert most_interesting([]) is None
