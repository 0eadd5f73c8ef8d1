"""What a call needs of whoever answers it, worked out when first asked for.

Balancers and deployments read it; it knows no target and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import ref

from resilient_llm.policies.tokens import estimate_once, prompt_tokens
from resilient_llm.providers import dialect_for
from resilient_llm.providers.base import asked
from resilient_llm.routing.features import features_of
from resilient_llm.routing.prefix import prefix_hash

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.policies.tokens import Estimate

__all__ = ["Needs"]

_TURNS = ("messages", "contents", "input")
_OWN_TURNS = frozenset({"assistant", "model"})


class Needs:
    """Say what one call needs: a dialect, capabilities, room for its prompt."""

    def __init__(self, call: Call, estimate: Estimate, place: object = None, larger_than: int = 0) -> None:
        owner = call.parent or call
        # The call holds its route, and the route this: held in return, all of a request would be left to the
        # garbage collector.
        self._attempt = ref(call)
        self._owner = ref(owner)
        self.request = call.request
        """The request it is, as its caller has written it."""
        self.continues = call.streaming.declared and owner.broke is not None
        """Whether it goes on with an answer that broke off, which only targets may that say they can."""
        self._estimate = estimate
        self.place = place
        """Where the stored answer is kept that it goes on from; `None` when there is none, or nobody knows."""
        self.larger_than = larger_than
        """The context window, in tokens, that was too small for it; 0 while none was, and -1 for one nobody knows."""
        self.is_particular = place is not None or self.continues or larger_than != 0
        """Whether not every target may carry it out, whatever that says of itself."""

    @property
    def _call(self) -> Call:
        """Give the attempt it was made for, or the call when that attempt is over."""
        call = self._attempt() or self._owner()
        assert call is not None  # noqa: S101 - whoever asks has it, or a later attempt of it
        return call

    @cached_property
    def dialect(self) -> str:
        """Give the dialect that it is written in."""
        return dialect_for(self.request).name

    @cached_property
    def tokens(self) -> float:
        """Give the tokens it is estimated to use, of the prompt and the answer."""
        return estimate_once(self._call, self._estimate)

    @cached_property
    def prompt(self) -> float:
        """Give the tokens that its prompt is estimated to have."""
        return prompt_tokens(self._call, self._estimate)

    @cached_property
    def _prefix(self) -> int:
        return prefix_hash(self.request)

    def prefix(self) -> int:
        """Give the hash of what it has in common with the other calls of its conversation."""
        return self._prefix

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """Give what its model must be able to do."""
        return frozenset(_capabilities(self.request.json))

    def fits(self, window: int | None) -> bool:
        """Tell whether it fits a context window; one that nobody knows fits until another was too small."""
        if self.larger_than:
            return window is not None and window > max(self.larger_than, self.prompt)
        return window is None or self.prompt <= window

    def outgrew(self, window: int | None) -> None:
        """Note that a target found it too long."""
        self.larger_than = max(self.larger_than, window or -1) or -1
        self.is_particular = True


def _capabilities(body: Mapping[str, object]) -> Iterator[str]:
    if asked(body.get("stream")):
        yield "streaming"
    shape = body.get("response_format")
    if isinstance(shape, Mapping) and shape.get("type") == "json_schema":
        yield "json_schema"
    for name in _TURNS:
        turns = body.get(name)
        last = turns[-1] if isinstance(turns, list) and turns else None
        if isinstance(last, Mapping) and str(last.get("role")) in _OWN_TURNS:
            yield "prefill"
    features = features_of(body)
    for capability, wanted in (
        ("tools", features.tools),
        ("vision", features.images),
        ("audio", features.audio),
    ):
        if wanted:
            yield capability
