"""Whole replies, kept for a time and given again to who asks the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import at_least, flag, label, seconds
from resilient_llm.core.request_key import IGNORED_FIELDS
from resilient_llm.ordering import Placement
from resilient_llm.policies._kept_replies import KeptReplies
from resilient_llm.policies._sameness import Sameness, When, refuse_functions
from resilient_llm.policies._shared_replies import SharedReplies
from resilient_llm.policies.reply_store import MemoryReplyStore, check_reply_store
from resilient_llm.telemetry.names import LIMITER_NAME

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.ordering import Door
    from resilient_llm.policies.reply_store import ReplyStore
    from resilient_llm.telemetry import Telemetry

__all__ = ["Cache"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cache:
    """Keep whole replies for `ttl` seconds, and give them to later calls that ask the same; these cost nothing.

    What is the same, and which calls may have the same reply, is as for `Coalesce`, which is part of this unless
    `coalesce` is off. Kept are successful replies (2xx) of at most `max_body` bytes that were whole, streams as their
    bytes; a stream is given again as a stream, in one piece. They are kept in `store`, by default a `MemoryReplyStore`.
    One that fails, or takes longer than `store_timeout` seconds, is gone without.
    """

    ttl: float = 300.0
    when: When | None = None
    share: bool = False
    coalesce: bool = True
    max_wait: float = 60.0
    max_body: int = 1024 * 1024
    ignore_fields: Collection[str] = IGNORED_FIELDS
    ignore_headers: Collection[str] = ()
    store: ReplyStore = field(default_factory=MemoryReplyStore)
    store_timeout: float = 0.25
    name: str = "cache"
    placement: ClassVar[Placement] = Placement.CACHE
    _replies: SharedReplies = field(init=False, repr=False)
    _sameness: Sameness = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seconds(max_wait=self.max_wait, zero=True, infinite=True)
        at_least(0, max_body=self.max_body)
        label(name=self.name)
        check_reply_store(store=self.store)
        sameness = Sameness(
            self.when,
            share=self.share,
            ignore_fields=self.ignore_fields,
            ignore_headers=self.ignore_headers,
        )
        seconds(ttl=self.ttl, store_timeout=self.store_timeout)
        flag(coalesce=self.coalesce)
        replies = SharedReplies(
            self.name,
            "hit",
            kept=KeptReplies(self.store, name=self.name, timeout=self.store_timeout),
            ttl=self.ttl,
            max_body=self.max_body,
            max_wait=self.max_wait,
            coalesce=self.coalesce,
            share_failures=not self.share,
        )
        object.__setattr__(self, "_replies", replies)
        object.__setattr__(self, "_sameness", sameness)

    def check_door(self, door: Door) -> None:
        """Raise `ConfigurationError` where calls have no requests that could be compared."""
        refuse_functions(self.name, door)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Give the reply that is kept, or await the rest of the pipeline and keep its reply."""
        key = self._sameness.key(call)
        return await (
            call_next(call) if key is None else self._replies.reply(call, call_next, f"reply:{key}")
        )

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauges `cache.entries` and `cache.size`, of a store in this process."""
        if isinstance(self.store, MemoryReplyStore):
            telemetry.observe("cache.entries", self._observe_entries, "{reply}", "Replies that are kept")
            telemetry.observe("cache.size", self._observe_size, "By", "Bytes that kept replies take")

    def _observe_entries(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        if isinstance(self.store, MemoryReplyStore):
            yield len(self.store), {LIMITER_NAME: self.name}

    def _observe_size(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        if isinstance(self.store, MemoryReplyStore):
            yield self.store.size, {LIMITER_NAME: self.name}
