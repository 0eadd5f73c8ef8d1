"""How long the parts of one attempt may take."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from resilient_llm._options import function, label, seconds
from resilient_llm.attempt_options import Clocks
from resilient_llm.errors import ConfigurationError
from resilient_llm.ordering import Placement
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.policies.circuit_breaker import CircuitBreaker
from resilient_llm.policies.deadline import Deadline

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply

__all__ = ["AttemptTimeout"]

_OWN = "the policy's own clocks hold"
_LIMITS = ("headers", "first_content", "content_gap", "whole_reply")


@dataclass(frozen=True, kw_only=True, eq=False)
class AttemptTimeout:
    """Give up an attempt whose parts take too long, in seconds from when it is sent.

    Of a stream: `headers` until the reply begins; `first_content` until the model's first content (text, thinking,
    a tool call) is there, whatever pings and role events come before; `content_gap` between two pieces of content,
    while the caller waits for one. Where no stream is asked for: `whole_reply` until the reply has been read, since
    a model makes all of such a reply before it begins. `None` is no limit. `for_call` may give other `Clocks` for an
    attempt, by its model, tenant or target. Too late is a failure of the target: it is retried, and counts for its
    circuit.

    Raises `ConfigurationError` for limits that contradict each other, or another policy.
    """

    headers: float | None = None
    first_content: float | None = None
    content_gap: float | None = None
    whole_reply: float | None = None
    for_call: Callable[[Call], Clocks | None] | None = None
    name: str = "attempt_timeout"
    placement: ClassVar[Placement] = Placement.ATTEMPT_CLOCKS
    _clocks: Clocks = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = {name: limit for name in _LIMITS if (limit := getattr(self, name)) is not None}
        seconds(**given)
        label(name=self.name)
        function(none=True, for_call=self.for_call)
        if not given and self.for_call is None:
            allowed = ", ".join(_LIMITS)
            raise ConfigurationError(f"AttemptTimeout() limits nothing: give {allowed} or for_call")
        if self.headers is not None and self.headers > (self.first_content or math.inf):
            msg = f"headers={self.headers!r}: allowed are seconds up to first_content={self.first_content!r}"
            raise ConfigurationError(msg)
        object.__setattr__(self, "_clocks", Clocks(**given))

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Set an attempt's clocks; whoever sends it keeps them."""
        chosen = None if self.for_call is None else self._choose(call, self.for_call)
        call.clocks = self._clocks if chosen is None else chosen
        return call_next(call)

    def _choose(self, call: Call, for_call: Callable[[Call], Clocks | None]) -> Clocks | None:
        """Ask the hook; what it makes of that breaks no call."""
        try:
            chosen: object = for_call(call)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
            hook_failed("for_call", for_call, error, instead=_OWN)
            return None
        if chosen is None or isinstance(chosen, Clocks):
            return chosen
        hook_gave("for_call", for_call, chosen, "Clocks, and None", instead=_OWN)
        return None

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` for limits that another policy makes meaningless."""
        given = (self.headers, self.first_content, self.content_gap, self.whole_reply)
        longest = max((limit for limit in given if limit is not None), default=0.0)
        for policy in policies:
            if isinstance(policy, Deadline) and longest >= policy.total:
                msg = f"the deadline (total={policy.total:g}) comes before the attempt's own limit ({longest:g} s)"
                raise ConfigurationError(msg)
            window = policy.sampling_duration if isinstance(policy, CircuitBreaker) else None
            if window is not None and window < 2 * longest:
                msg = (
                    f"sampling_duration={window:g}: allowed are at least 2 x the attempt's limit of {longest:g} s, "
                    "or failures would leave the window before the next ones come in"
                )
                raise ConfigurationError(msg)
