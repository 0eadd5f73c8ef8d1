"""What becomes of a stream that breaks, and how long it is held back before that can be seen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, cast, get_args, runtime_checkable

from resilient_llm._options import at_least, flag, function, label
from resilient_llm.attempt_options import Streaming
from resilient_llm.core.sse import DEFAULT_MAX_EVENT_SIZE
from resilient_llm.errors import ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.policies._hooks import hook_failed

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import JSONObject, Reply

__all__ = ["Prefill", "Resume", "Stream"]

Resume: TypeAlias = Literal["error", "continue", "buffer"]
"""What to do about a stream that breaks after the caller has seen some of it, or so that it never does."""

Prefill: TypeAlias = "Collection[str] | Callable[[Call], bool | JSONObject]"
"""Which calls can be gone on with: names of models, or a function of the call, which may also give fields that the
server wants in the request besides."""


@runtime_checkable
class DeclaresPrefill(Protocol):
    """Know which models go on from their own words; a `Router` does."""

    def goes_on(self, model: str | None) -> bool:
        """Tell whether a target that calls for this model may go to says so of itself; of any, for `None`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Say what happens to streams that break, one thing or several of which the first that fits is done.

    Without this policy, and with `"error"`, a stream is held back until its first content (at most `hold_max` bytes of
    it), and one that breaks later ends with an error event. `"buffer"` holds it back until it is whole, so that it
    is tried again whenever it breaks; one longer than `hold_max` is passed on all the same. `"continue"` asks the
    model for the rest, once, where `prefill` says that it goes on from the beginning of its own answer, or the targets
    of a `Router` say so (by default); if that
    fails, the caller is told of the first failure.

    Events that are not well-formed are passed on, or with `malformed="skip"` left out. One larger than
    `max_event_size` bytes breaks the stream. With `include_usage` OpenAI's completions are asked for their usage,
    which limits and traces go by, also for callers that do not ask; these get none. Not every server takes that.
    """

    resume: Resume | Sequence[Resume] = "error"
    prefill: Prefill | None = None
    hold_max: int = 1024 * 1024
    malformed: Literal["pass", "skip"] = "pass"
    max_event_size: int = DEFAULT_MAX_EVENT_SIZE
    include_usage: bool = False
    name: str = "stream"
    placement: ClassVar[Placement] = Placement.STREAM
    _modes: Sequence[Resume] = field(init=False, repr=False)
    _ending: Streaming = field(init=False, repr=False)
    """How the stream is passed on of a call that cannot be gone on with."""
    _routers: list[DeclaresPrefill] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        at_least(0, hold_max=self.hold_max)
        at_least(1, max_event_size=self.max_event_size)
        flag(include_usage=self.include_usage)
        label(name=self.name)
        if self.malformed not in ("pass", "skip"):
            raise ConfigurationError(f"malformed={self.malformed!r}: allowed are 'pass' and 'skip'")
        modes = _modes(self.resume)
        self._check_prefill()
        if self.prefill and "continue" not in modes:
            raise ConfigurationError(f"prefill={self.prefill!r}: allowed only with resume='continue'")
        object.__setattr__(self, "_modes", modes)
        ending = Streaming(
            until_complete=self._buffers(continues=False),
            hold_max=self.hold_max,
            max_event_size=self.max_event_size,
            skip_malformed=self.malformed == "skip",
            include_usage=self.include_usage,
            declared=not self.prefill,
        )
        object.__setattr__(self, "_ending", ending)

    def _check_prefill(self) -> None:
        prefill = self.prefill
        if prefill is None:
            return
        if isinstance(prefill, str):
            raise ConfigurationError(f"prefill={prefill!r}: a collection of models is wanted, not one string")
        if callable(prefill):
            function(prefill=prefill)
            return
        if not isinstance(prefill, Collection) or not all(isinstance(model, str) for model in prefill):
            raise ConfigurationError(
                f"prefill={prefill!r}: allowed are collections of models' names, and functions of the call"
            )

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` when a stream is to be gone on with and nobody says which models do that."""
        if "continue" not in self._modes or self.prefill:
            return
        routers = [policy for policy in policies if isinstance(policy, DeclaresPrefill)]
        if not any(router.goes_on(None) for router in routers):
            msg = (
                "resume='continue' needs prefill=, the models that go on from their own words, or a Router with "
                "targets that have 'prefill' among their capabilities"
            )
            raise ConfigurationError(msg)
        self._routers.extend(router for router in routers if router not in self._routers)

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Set how the call's stream is passed on; whoever receives it does so."""
        fields = self._fields(call) if "continue" in self._modes else None
        if fields is None:
            call.streaming = self._ending
        else:
            call.streaming = replace(
                self._ending,
                until_complete=self._buffers(continues=True),
                resume=call_next,
                prefill=fields,
            )
        return call_next(call)

    def _buffers(self, *, continues: bool) -> bool:
        for mode in self._modes:
            if mode == "buffer":
                return True
            if mode == "error" or continues:
                return False
        return False

    def _fields(self, call: Call) -> JSONObject | None:
        """Give what a request to go on has besides; `None` when the call cannot be gone on with."""
        profile = call.profile
        if not (profile.stream and profile.resumable and profile.repeat_safe):
            return None
        if not self.prefill:
            model = call.logical_model or call.model
            return {} if any(router.goes_on(model) for router in self._routers) else None
        if not callable(self.prefill):
            return {} if call.model in self.prefill else None
        try:
            declared = self.prefill(call)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
            hook_failed("prefill", self.prefill, error, instead="the call's stream is not gone on with")
            return None
        if isinstance(declared, Mapping):
            return declared
        return {} if declared else None


def _modes(resume: object) -> tuple[Resume, ...]:
    """Give what is to be done, first things first; raises `ConfigurationError` for what never would be."""
    allowed = get_args(Resume)
    modes = (resume,) if isinstance(resume, str) else tuple(resume) if isinstance(resume, Sequence) else ()
    if not modes or not all(isinstance(mode, str) and mode in allowed for mode in modes):
        msg = f"resume={resume!r}: allowed are {', '.join(map(repr, allowed))}, or a list of these"
        raise ConfigurationError(msg)
    if len(set(modes)) < len(modes):
        raise ConfigurationError(f"resume={resume!r}: each may be named once")
    if "error" in modes[:-1]:
        raise ConfigurationError(f"resume={resume!r}: 'error' always fits, so nothing may come after it")
    return cast("tuple[Resume, ...]", modes)
