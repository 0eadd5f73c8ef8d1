"""What a call is told to record, when nobody listens: nothing, at next to no cost.

These two classes are the whole surface that doors, policies and streams know; the recorders do the work.
"""

# ruff: noqa: A002, ARG002 - `id` is called so; nobody listens

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from resilient_llm.call import Call
    from resilient_llm.errors import RejectedError
    from resilient_llm.message import Request

__all__ = ["AttemptTelemetry", "CallTelemetry", "Routing", "WaitOutcome"]

WaitOutcome: TypeAlias = Literal["acquired", "timeout", "rejected", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Say how the target of an attempt was chosen; `selected` is `None` where there was none to choose."""

    strategy: str
    reason: str
    candidates: Sequence[str]
    scores: Sequence[float]
    """What the balancer went by, of each of the candidates."""
    rejected: Sequence[str]
    """Those passed over, as `target:why`."""
    selected: str | None
    previous: str | None
    """The target of the attempt before."""


class AttemptTelemetry:
    """Hear about one attempt."""

    __slots__ = ()

    def attach(self) -> None:
        """Make the attempt current, around one await."""

    def detach(self) -> None:
        """Undo `attach`."""

    def inject(self, request: Request) -> Request:
        """Give the request with this attempt's trace context in a copy of its headers."""
        return request

    def replied(self, status: int) -> None:
        """Hear that the head of a reply came."""


class CallTelemetry:
    """Hear about one call and keep its sums of waiting. Safe to call whatever the application has configured."""

    __slots__ = ()

    @property
    def recording(self) -> bool:
        """Tell whether anybody keeps what is told of the call in detail."""
        return False

    def start(self, call: Call) -> None:
        """Hear that a call began, before anything else; it ends when `call` finishes.

        An inbound call belongs to the span of the server, which ends by itself.
        """

    def attach(self) -> None:
        """Make the call current, around what carries it out."""

    def detach(self) -> None:
        """Undo `attach`."""

    def attempt(self, attempt: Call) -> AttemptTelemetry:
        """Hear that an attempt is sent; it ends when `attempt` finishes."""
        return SILENT_ATTEMPT

    def answered(self, *, id: str | None, model: str | None, finish_reasons: Sequence[str]) -> None:
        """Hear what a reply says of itself, before the call that it answers finishes."""

    def waited(
        self, call: Call, limiter: str, *, since: float, outcome: WaitOutcome, unit: str, depth: int = 0
    ) -> None:
        """Hear that a wait for a limiter, by a call or an attempt, is over.

        `unit` is what is limited (requests, tokens, concurrency), `depth` how many stood in the queue.
        """
        whole = call.parent or call
        whole.wait_time += call.loop.time() - since

    def backoff(
        self,
        call: Call,
        *,
        since: float,
        planned: float,
        source: str,
        next_attempt: int,
        budget: float | None,
    ) -> None:
        """Hear that a backoff is over."""
        call.retry_delay += call.loop.time() - since

    def step(self, call: Call, name: str, *, since: float) -> None:
        """Hear that the call spent time on something else that is worth a span of this name."""

    def rejected(self, call: Call, error: RejectedError, *, dry_run: bool = False) -> None:
        """Hear that a call or attempt was refused on this side, or in a dry run would have been."""

    def routed(self, routing: Routing) -> None:
        """Hear which target an attempt goes to; worth telling only while `recording`."""

    def retry_suppressed(self, call: Call, why: str) -> None:
        """Hear that a failure that could be retried was not."""

    def breaker_changed(self, call: Call, name: str, from_: str, to: str, reason: str) -> None:
        """Hear that a circuit changed its state."""

    def event(self, call: Call, name: str, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """Hear of anything else; `name` is without our prefix."""


SILENT = CallTelemetry()
SILENT_ATTEMPT = AttemptTelemetry()
