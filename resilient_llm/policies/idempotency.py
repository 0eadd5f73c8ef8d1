"""A request that its caller sends again, by an `Idempotency-Key`, is carried out once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import at_least, label, seconds
from resilient_llm.core.request_key import owner_digest, question_digest
from resilient_llm.ordering import Placement
from resilient_llm.policies._kept_replies import KeptReplies
from resilient_llm.policies._sameness import refuse_functions
from resilient_llm.policies._shared_replies import SharedReplies
from resilient_llm.policies.reply_store import MemoryReplyStore, check_reply_store

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.ordering import Door
    from resilient_llm.policies.reply_store import ReplyStore

__all__ = ["Idempotency"]

_KEY = b"idempotency-key"


@dataclass(frozen=True, kw_only=True, eq=False)
class Idempotency:
    """Give a request whose `Idempotency-Key` has been answered that answer again, for `ttl` seconds.

    A key counts for one tenant with one set of credentials. The same key with another method, URL or body raises
    `IdempotencyKeyError` (422). While the first request is in flight the second waits for its reply, and raises
    `IdempotencyKeyError` (409) after `max_wait` seconds. Only success is kept: after a failure the same key is another
    try. What is not kept either, a reply of more than `max_body` bytes or a stream that nobody has read to its end, is
    asked for anew. For `store` and `store_timeout` see `Cache`.

    Source: draft-ietf-httpapi-idempotency-key-header.
    """

    ttl: float = 86_400.0
    max_wait: float = 60.0
    max_body: int = 1024 * 1024
    store: ReplyStore = field(default_factory=MemoryReplyStore)
    store_timeout: float = 0.25
    name: str = "idempotency"
    placement: ClassVar[Placement] = Placement.CACHE
    _replies: SharedReplies = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seconds(ttl=self.ttl, store_timeout=self.store_timeout)
        seconds(max_wait=self.max_wait, zero=True, infinite=True)
        at_least(0, max_body=self.max_body)
        label(name=self.name)
        check_reply_store(store=self.store)
        replies = SharedReplies(
            self.name,
            "replay",
            kept=KeptReplies(self.store, name=self.name, timeout=self.store_timeout),
            ttl=self.ttl,
            max_body=self.max_body,
            max_wait=self.max_wait,
            strict=True,
        )
        object.__setattr__(self, "_replies", replies)

    def check_door(self, door: Door) -> None:
        """Raise `ConfigurationError` where calls have no requests that could have a key."""
        refuse_functions(self.name, door)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Give the answer that the key has had, or await the rest of the pipeline and keep its answer."""
        request = call.request
        key = request.header(_KEY)
        if not key or request.body is None:
            return await call_next(call)
        fingerprint = question_digest(request.method, request.url, request.body)
        owner = owner_digest(call.tenant, request.url, request.headers, key)
        return await self._replies.reply(call, call_next, f"idempotency:{owner}", fingerprint)
