"""What can go wrong with one request, as a value. How it is played out is `_playback`'s business."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ._checks import is_count, is_number

_INTERRUPTIONS = (
    "reset_after_tokens",
    "cut_after_tokens",
    "end_after_tokens",
    "stall_after_tokens",
    "error_event_at",
)
_OF_REPLIES = (*_INTERRUPTIONS, "malformed_event_at", "omit_done", "empty_stream", "finish_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Describe how the provider misbehaves on one request. `Fault()` is `OK`: it does not.

    An answer instead of a reply, with the dialect's own error body unless `body` is given:

    - `status`, `headers`, `body` (text, bytes, or a mapping sent as JSON; alone it means status
      200).
    - `code`, `type`, `message`: fields of the error body.

    Time, in seconds, on top of the model's latency; `math.inf` is for ever:

    - `delay_headers` before the head of the response, `delay_first_token` after it and before the
      first token, `token_delay` before each further token (a slow drip).
    - `ping_every`: a keep-alive (a comment; Anthropic's `ping` event) each so often while a stream
      is silent.

    The connection, and the stream. Counts are of tokens already sent; a reply with fewer is
    interrupted after its last. At most one of these interruptions may be set:

    - `reset`: the connection is reset before anything is answered; `reset_after_tokens`: in the
      middle.
    - `cut_after_tokens`: the connection is closed with no end of the body.
    - `end_after_tokens`: the stream ends properly, but with no finish reason or terminal marker.
    - `stall_after_tokens`: nothing more comes, until the client goes away.
    - `error_event_at`: an error event in a 200 stream, of the class `status` (default 500), then
      the end.

    The content of the reply:

    - `malformed_event_at`: the token event of this index (from 0) is broken JSON.
    - `omit_done`: no terminal marker (`[DONE]`, `message_stop`, `response.completed`).
    - `empty_stream`: status 200 and not one byte.
    - `finish_reason`: instead of the dialect's "stop" or "length".
    - `chunk_size`: the body is sent in pieces of so many bytes, wherever they cut it.

    A reply that is not streamed suffers the like: all its tokens' time passes before the head, a
    cut or reset comes half-way through the body, an error event becomes a 200 with an error as its
    body, broken JSON is a truncated body. `end_after_tokens`, `omit_done` and `ping_every` mean
    nothing there.

    Raises ValueError for values out of range or that contradict each other.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    body: str | bytes | Mapping[str, object] | None = field(default=None, hash=False)
    code: str | None = None
    type: str | None = None
    message: str | None = None
    delay_headers: float = 0.0
    delay_first_token: float = 0.0
    token_delay: float = 0.0
    ping_every: float | None = None
    reset: bool = False
    reset_after_tokens: int | None = None
    cut_after_tokens: int | None = None
    end_after_tokens: int | None = None
    stall_after_tokens: int | None = None
    error_event_at: int | None = None
    malformed_event_at: int | None = None
    omit_done: bool = False
    empty_stream: bool = False
    finish_reason: str | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.status is not None and not (is_count(self.status) and 200 <= self.status <= 599):
            raise ValueError(f"status must be an HTTP status of 200 to 599, got {self.status!r}")
        for name in ("delay_headers", "delay_first_token", "token_delay"):
            if not (is_number(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be >= 0 seconds, got {getattr(self, name)!r}")
        if self.ping_every is not None and not (
            is_number(self.ping_every) and 0 < self.ping_every < math.inf
        ):
            raise ValueError(f"ping_every must be > 0 seconds and finite, got {self.ping_every!r}")
        for name in (*_INTERRUPTIONS, "malformed_event_at"):
            count = getattr(self, name)
            if count is not None and not (is_count(count) and count >= 0):
                raise ValueError(f"{name} must be >= 0 tokens, got {count!r}")
        if self.chunk_size is not None and not (is_count(self.chunk_size) and self.chunk_size >= 1):
            raise ValueError(f"chunk_size must be >= 1 byte, got {self.chunk_size!r}")
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        chosen = [name for name in _INTERRUPTIONS if getattr(self, name) is not None]
        chosen += [name for name in ("reset", "empty_stream") if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"a reply is interrupted once: {' and '.join(chosen)} exclude each other")
        if self.error_event_at is not None and isinstance(self.body, str | bytes):
            raise ValueError(f"the body of an error event must be a mapping, got {self.body!r}")
        if self.is_answer:
            useless = [name for name in ("reset", *_OF_REPLIES) if getattr(self, name) not in (None, False)]
            if useless:
                raise ValueError(
                    f"an answer by status or body has no reply that {', '.join(useless)} could apply to"
                )

    @property
    def interruption(self) -> int | None:
        """After how many tokens the reply is interrupted, in whichever way; None when it is not."""
        return next((n for name in _INTERRUPTIONS if (n := getattr(self, name)) is not None), None)

    @property
    def is_answer(self) -> bool:
        """Whether the request is answered by `status` and `body` instead of a reply."""
        return self.error_event_at is None and (self.status is not None or self.body is not None)


OK: Final = Fault()
"""No fault: the request is served."""
