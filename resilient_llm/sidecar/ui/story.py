"""What one call went through, in the order in which it happened: the spans of its trace, without any SDK.

Noted as it is told, in tuples, and put into words only when somebody looks.
"""

# ruff: noqa: ARG002 - a listener hears more than it notes

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from resilient_llm.telemetry import CallListener, Routing, WaitOutcome, names
from resilient_llm.telemetry.words import attempt_outcome

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from resilient_llm.call import Call
    from resilient_llm.errors import RejectedError
    from resilient_llm.outcome import Outcome
    from resilient_llm.sidecar.ui.recent import Recent
    from resilient_llm.sidecar.ui.shapes import StepRow
    from resilient_llm.sidecar.ui.tally import Tally

__all__ = ["Story"]

_MOST_STEPS = 64
_SHORTEST = 0.001
"""Seconds; what took less is not worth a line, as in a trace."""


class _Attempt(NamedTuple):
    number: int
    reason: str
    target: str
    model: str | None
    outcome: Outcome


class _Event(NamedTuple):
    name: str
    attributes: Mapping[str, AttributeValue] | None


_Said: TypeAlias = "_Attempt | _Event | Routing | dict[str, Any]"
_Step: TypeAlias = "tuple[str, float, float, _Said]"
"""What kind it is, from when to when on the loop's clock, and what is to be said of it."""


class Story(CallListener):
    """Note what happens to one call, and keep its tenant's counts of calls under way."""

    detailed = False
    """Whether decisions are noted: those of a call that something has happened to, others while somebody looks."""
    ended = False
    eventful = False
    """Whether something was refused, waited out, or changed."""
    left_out = 0
    """Steps that there was no room for."""
    _began = 0.0
    _active = 0
    _now: Callable[[], float]
    _tally: Tally

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self._steps: list[_Step] = []

    def start(self, call: Call) -> None:
        """Begin."""
        self._began = call.started
        self.detailed = self._recent.watched_until > call.started
        self._now = call.loop.time
        tally = self._tally = self._recent.tally(call.tenant)
        tally.running += 1
        tally.waiting += 1
        call.on_finish(self._end)

    def _end(self, _outcome: Outcome) -> None:
        self.ended = True
        self._tally.running -= 1
        if not self._active:
            self._tally.waiting -= 1

    def attempt(self, attempt: Call) -> None:
        """Follow an attempt to its end."""
        if not self._active and not self.ended:
            self._tally.waiting -= 1
        self._active += 1
        attempt.on_finish(partial(self._attempt_ended, attempt))

    def _attempt_ended(self, attempt: Call, outcome: Outcome) -> None:
        self._active -= 1
        if not self._active and not self.ended:
            self._tally.waiting += 1
        said = _Attempt(attempt.number, attempt.reason, attempt.target.name, attempt.model, outcome)
        self._note("attempt", attempt.started, said)

    def waited(
        self, call: Call, limiter: str, *, since: float, outcome: WaitOutcome, unit: str, depth: int
    ) -> None:
        """Note a wait."""
        if self._now() - since >= _SHORTEST:
            who = call.number or None
            self._note(
                "wait",
                since,
                {"limiter": limiter, "outcome": outcome, "unit": unit, "depth": depth, "attempt": who},
            )

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
        """Note a backoff."""
        self.eventful = True
        self._note(
            "backoff", since, {"planned": planned * 1e3, "source": source, "next_attempt": next_attempt}
        )

    def step(self, call: Call, name: str, *, since: float) -> None:
        """Note what else took time."""
        if self._now() - since >= _SHORTEST:
            self._note("step", since, {"name": name})

    def routed(self, routing: Routing) -> None:
        """Note a decision."""
        self._note("route", None, routing)

    def rejected(self, call: Call, error: RejectedError, *, dry_run: bool) -> None:
        """Note a refusal; its message is for the caller."""
        self.eventful = True
        self._note("rejected", None, {"limiter": error.name, "reason": error.reason, "dry_run": dry_run})

    def retry_suppressed(self, call: Call, why: str) -> None:
        """Note that there was no retry."""
        self.eventful = True
        self._note("retry_suppressed", None, {"reason": why})

    def breaker_changed(self, call: Call, name: str, from_: str, to: str, reason: str) -> None:
        """Note that a circuit changed."""
        self.eventful = True
        self._note("circuit", None, {"name": name, "from": from_, "to": to, "reason": reason})

    def event(self, call: Call, name: str, attributes: Mapping[str, AttributeValue] | None) -> None:
        """Note anything else."""
        self._note("event", None, _Event(name, attributes))

    def _note(self, kind: str, since: float | None, said: _Said) -> None:
        if len(self._steps) >= _MOST_STEPS:
            self.left_out += 1
            return
        now = self._now()
        self.detailed = True
        self._steps.append((kind, now if since is None else since, now, said))

    def rows(self) -> list[StepRow]:
        """Give the steps in the order in which they began."""
        return [
            {
                "kind": kind,
                "at": max(0.0, since - self._began) * 1e3,
                "took": max(0.0, until - since) * 1e3,
                "facts": _facts(said),
            }
            for kind, since, until, said in sorted(self._steps, key=_since)
        ]


def _since(step: _Step) -> float:
    return step[1]


def _facts(said: _Said) -> dict[str, Any]:
    if isinstance(said, dict):
        return said
    if isinstance(said, Routing):
        return {
            "strategy": said.strategy,
            "reason": said.reason,
            "selected": said.selected,
            "from": said.previous,
            "candidates": list(said.candidates),
            "scores": [_finite(score) for score in said.scores],
            "rejected": list(said.rejected),
        }
    if isinstance(said, _Event):
        about = said.attributes or {}
        return {"name": said.name, "about": {_short(key): _plain(value) for key, value in about.items()}}
    outcome = said.outcome
    return {
        "number": said.number,
        "reason": said.reason,
        "target": said.target,
        "model": said.model,
        "outcome": attempt_outcome(outcome),
        "error": outcome.error_type,
        "status": outcome.status,
        "retry_after": None if outcome.retry_after is None else _finite(outcome.retry_after * 1e3),
        "possibly_billed": outcome.ambiguous,
    }


def _short(name: str) -> str:
    return name.removeprefix(f"{names.SCOPE}.")


def _plain(value: AttributeValue) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
