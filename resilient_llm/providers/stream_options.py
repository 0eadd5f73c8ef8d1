"""Ask for the usage of a stream where the API says it only to those who ask.

OpenAI's completions bring it in a chunk of its own, without a choice, which clients that did not ask for it do not
expect. Leaving that out again is the business of whoever asked in their name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from resilient_llm.location import locate
from resilient_llm.message import Request
from resilient_llm.providers.base import asked

__all__ = ["asks_for_usage", "with_usage"]


def asks_for_usage(request: Request) -> bool:
    """Tell whether a request asks for the usage of its stream."""
    options = request.json.get("stream_options")
    return isinstance(options, Mapping) and asked(options.get("include_usage"))


def with_usage(request: Request) -> Request:
    """Give a request that asks; the same one where it does already, or its API has nothing to ask for."""
    body = request.json
    completions = locate(request.url).path.endswith("/completions")
    if not completions or body.get("stream") is not True or asks_for_usage(request):
        return request
    options = body.get("stream_options")
    options = dict(options) if isinstance(options, Mapping) else {}
    written = json.dumps({**body, "stream_options": {**options, "include_usage": True}}).encode()
    return request.with_body(written)
