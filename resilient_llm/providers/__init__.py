"""What providers' requests ask for and what their replies mean.

Structured signals only: routes, statuses, headers, the names in error bodies, the classes of exceptions. What
to do about any of it is a policy's business. A new dialect is one small file with the names of its errors in
`codes`, an entry in `DIALECTS` and its examples in the tests.
"""

from resilient_llm.message import Request
from resilient_llm.providers.answer import Answer, EventKind
from resilient_llm.providers.anthropic import ANTHROPIC
from resilient_llm.providers.base import Dialect, Framing
from resilient_llm.providers.bedrock import BEDROCK
from resilient_llm.providers.body import (
    EVENT_STREAM,
    MODEL_OPERATIONS,
    is_event_stream,
    is_json,
    media_type,
    read_body,
)
from resilient_llm.providers.content import ContentDecoder, decode_body
from resilient_llm.providers.exceptions import classify_exception
from resilient_llm.providers.gemini import GEMINI
from resilient_llm.providers.openai import OPENAI
from resilient_llm.providers.problem import Problem, parse, read_problem
from resilient_llm.providers.stream_reader import StreamReader
from resilient_llm.providers.unknown import UNKNOWN

__all__ = [
    "ANTHROPIC",
    "BEDROCK",
    "DIALECTS",
    "EVENT_STREAM",
    "GEMINI",
    "MODEL_OPERATIONS",
    "OPENAI",
    "UNKNOWN",
    "Answer",
    "ContentDecoder",
    "Dialect",
    "EventKind",
    "Framing",
    "Problem",
    "StreamReader",
    "classify_exception",
    "decode_body",
    "dialect_for",
    "is_event_stream",
    "is_json",
    "media_type",
    "parse",
    "read_body",
    "read_problem",
]

# Routes first: one host may serve several dialects, and the most particular ones come before its own.
DIALECTS: tuple[Dialect, ...] = (OPENAI, ANTHROPIC, BEDROCK, GEMINI)


def dialect_for(request: Request) -> Dialect:
    """Give the dialect a request is written in, `UNKNOWN` when it is none of `DIALECTS`."""
    dialect = request.dialect
    if dialect is None:
        dialect = UNKNOWN
        for known in DIALECTS:
            if known.matches(request):
                dialect = known
                break
        request.dialect = dialect
    return dialect
