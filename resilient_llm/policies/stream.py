"""What becomes of a stream that breaks, and how long it is held back before that can be seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from resilient_llm.call import Streaming
from resilient_llm.errors import ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.policies._options import at_least

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import JSONObject, Reply

__all__ = ["Prefill", "Resume", "Stream"]

Resume: TypeAlias = Literal["error", "continue", "buffer"]
"""What to do about a stream that breaks after the caller has seen some of it, or so that it never does."""

Prefill: TypeAlias = "Collection[str] | Callable[[Call], bool | JSONObject]"
"""Which calls can be gone on with: names of models, or a function of the call, which may also give fields that the
server wants in the request besides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Say what happens to streams that break, one thing or several of which the first that fits is done.

    Without this policy, and with `"error"`, a stream is held back until its first content (at most `hold_max` bytes of
    it), and one that breaks later ends with an error event. `"buffer"` holds it back until it is whole, so that it
    is tried again whenever it breaks; one longer than `hold_max` is passed on all the same. `"continue"` asks the
    model for the rest, once, where `prefill` says that it goes on from the beginning of its own answer; if that
    fails, the caller is told of the first failure.

    Events that are not well-formed are passed on, or with `malformed="skip"` left out. One larger than
    `max_event_size` bytes breaks the stream. With `include_usage` OpenAI's completions are asked for their usage,
    which limits and traces go by, also for callers that do not ask; these get none. Not every server takes that.
    """

    resume: Resume | Sequence[Resume] = "error"
    prefill: Prefill = ()
    hold_max: int = 1024 * 1024
    malformed: Literal["pass", "skip"] = "pass"
    max_event_size: int = 8 * 1024 * 1024
    include_usage: bool = False
    name: str = "stream"
    placement: ClassVar[Placement] = Placement.STREAM
    _modes: Sequence[Resume] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        at_least(0, hold_max=self.hold_max)
        at_least(1, max_event_size=self.max_event_size)
        modes = (self.resume,) if isinstance(self.resume, str) else tuple(self.resume)
        allowed = get_args(Resume)
        if not modes or not set(modes) <= set(allowed):
            msg = f"resume={self.resume!r}: allowed are {', '.join(map(repr, allowed))}, or a list of these"
            raise ConfigurationError(msg)
        if self.malformed not in ("pass", "skip"):
            raise ConfigurationError(f"malformed={self.malformed!r}: allowed are 'pass' and 'skip'")
        if isinstance(self.prefill, str):
            raise ConfigurationError(
                f"prefill={self.prefill!r}: a collection of models is wanted, not one string"
            )
        if ("continue" in modes) != bool(self.prefill):
            msg = "resume='continue' needs prefill=, the models that go on from their own words; nothing else does"
            raise ConfigurationError(msg)
        object.__setattr__(self, "_modes", modes)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Set how the call's stream is passed on; whoever receives it does so."""
        fields = self._fields(call) if "continue" in self._modes else None
        call.streaming = Streaming(
            until_complete=self._buffers(continues=fields is not None),
            hold_max=self.hold_max,
            max_event_size=self.max_event_size,
            skip_malformed=self.malformed == "skip",
            include_usage=self.include_usage,
            resume=None if fields is None else call_next,
            prefill=fields,
        )
        return await call_next(call)

    def _buffers(self, *, continues: bool) -> bool:
        for mode in self._modes:
            if mode == "buffer":
                return True
            if mode == "error" or continues:
                return False
        return False

    def _fields(self, call: Call) -> JSONObject | None:
        """Give what a request to go on has besides; `None` when the call cannot be gone on with."""
        if not call.profile.stream:
            return None
        if not callable(self.prefill):
            return {} if call.model in self.prefill else None
        declared = self.prefill(call)
        if isinstance(declared, Mapping):
            return declared
        return {} if declared else None
