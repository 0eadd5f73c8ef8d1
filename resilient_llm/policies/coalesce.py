"""Identical calls at the same time make one attempt between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import at_least, label, seconds
from resilient_llm.core.request_key import IGNORED_FIELDS
from resilient_llm.ordering import Placement
from resilient_llm.policies._sameness import Sameness, When, refuse_functions
from resilient_llm.policies._shared_replies import SharedReplies

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.ordering import Door

__all__ = ["Coalesce"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Coalesce:
    """Let calls that ask the same at the same time wait for the first of them, and get its reply.

    Which calls may: those of which `when` says so, by default those that are expected to have one answer, see
    `docs/coalesce.md`. The same ask calls of one tenant with the same credentials, method, URL, headers and body, but
    for members named in `ignore_fields` and headers in `ignore_headers`; with `share` whoever they come from. A stream
    is given to who waits when it is whole.

    Who waits keeps its own deadline, can be cancelled without anybody noticing, and makes the call itself after
    `max_wait` seconds. When the first is cancelled, another makes the call anew and the rest wait for that one. When
    it fails, they fail as it did, except with `share`, and except for a stream that breaks after it has begun: of
    that they have seen nothing, so it is as if it had been cancelled. A reply of more than `max_body` bytes is the
    first call's alone.

    Source: the `singleflight` package of Go.
    """

    when: When | None = None
    share: bool = False
    max_wait: float = 60.0
    max_body: int = 1024 * 1024
    ignore_fields: Collection[str] = IGNORED_FIELDS
    ignore_headers: Collection[str] = ()
    name: str = "coalesce"
    placement: ClassVar[Placement] = Placement.CACHE
    _replies: SharedReplies = field(init=False, repr=False)
    _sameness: Sameness = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seconds(max_wait=self.max_wait, zero=True, infinite=True)
        at_least(0, max_body=self.max_body)
        label(name=self.name)
        sameness = Sameness(
            self.when,
            share=self.share,
            ignore_fields=self.ignore_fields,
            ignore_headers=self.ignore_headers,
        )
        replies = SharedReplies(
            self.name,
            "coalesced",
            max_body=self.max_body,
            max_wait=self.max_wait,
            share_failures=not self.share,
        )
        object.__setattr__(self, "_replies", replies)
        object.__setattr__(self, "_sameness", sameness)

    def check_door(self, door: Door) -> None:
        """Raise `ConfigurationError` where calls have no requests that could be compared."""
        refuse_functions(self.name, door)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Wait for a call in flight that asks the same, or be the one that others wait for."""
        key = self._sameness.key(call)
        return await (call_next(call) if key is None else self._replies.reply(call, call_next, key))
