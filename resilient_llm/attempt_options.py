"""How long an attempt may take, and how the stream that answers it is passed on: what policies ask of doors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient_llm._options import seconds
from resilient_llm.core.sse import DEFAULT_MAX_EVENT_SIZE

if TYPE_CHECKING:
    from resilient_llm.call import CallNext
    from resilient_llm.message import JSONObject

__all__ = ["Clocks", "Streaming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Say how long the parts of an attempt may take, in seconds.

    `headers` until the reply begins, `first_content` until the model's first content is there (both from
    when the request is sent), `content_gap` between two pieces of content while somebody waits for one.
    `whole_reply` stands for all of them where no stream is asked for. Raises `ConfigurationError` for a limit that
    is none.
    """

    headers: float = math.inf
    first_content: float = math.inf
    content_gap: float = math.inf
    whole_reply: float = math.inf

    def __post_init__(self) -> None:
        seconds(
            headers=self.headers,
            first_content=self.first_content,
            content_gap=self.content_gap,
            whole_reply=self.whole_reply,
            infinite=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Say how the stream that answers a call is passed on.

    It is held back until it has content, or with `until_complete` until it is whole, though never more than
    `hold_max` bytes of it. With `skip_malformed` events that cannot be read are left out. With `include_usage`
    usage is asked for, and left out where the caller did not ask. With `resume`, which carries out the call once
    more, and adds `prefill` to the request, a stream that breaks is gone on with.
    """

    until_complete: bool = False
    hold_max: int = 1024 * 1024
    max_event_size: int = DEFAULT_MAX_EVENT_SIZE
    skip_malformed: bool = False
    include_usage: bool = False
    resume: CallNext | None = None
    prefill: JSONObject | None = None
    declared: bool = False
    """Whether only targets that say so of themselves may go on with it."""
