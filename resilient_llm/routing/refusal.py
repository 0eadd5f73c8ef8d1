"""What a call is told that no target can take: why of each, and whether and when to come again.

An open circuit passes, a capability that is missing does not. Which targets may take a call must not be decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from resilient_llm.errors import ContextWindowError, NoTargetError, RejectedError
from resilient_llm.routing.deployment import ELSEWHERE

if TYPE_CHECKING:
    from resilient_llm.routing.deployment import Deployment
    from resilient_llm.routing.needs import Needs

__all__ = ["Passed", "refusal"]

_UNSUITABLE = frozenset(
    {"body", "capabilities", "context_window", "dialect", "encoded_body", "path", "prefill", "route"}
)
"""Why a target is none for a call as that is written, whenever it comes."""


class Passed(NamedTuple):
    """Say why a target was passed over."""

    deployment: Deployment
    why: str
    back_in: float
    """Seconds until it can be asked again; infinity when nobody knows."""
    error: RejectedError | None = None
    """What it refused the call with."""

    def __str__(self) -> str:
        return f"{self.deployment.target.name}:{self.why}"


def refusal(passed: Sequence[Passed], needs: Needs, name: str) -> RejectedError:
    """Make the error for a call that every target was passed over for.

    What a target's own limits refused it with, if any did, and of these what passes first. Else a
    `ContextWindowError` when the prompt is too long for all, and a `NoTargetError`, which is a 400 if it is only the
    call's own fault.
    """
    errors = [one.error for one in passed if one.error is not None]
    limits = [error for error in errors if not isinstance(error, NoTargetError)]
    if limits:
        return min(limits, key=_passes_in)
    said = ", ".join(_said(one, needs) for one in passed)
    words = {one.why for one in passed} - {ELSEWHERE}
    if words == {"context_window"}:
        return ContextWindowError(f"the prompt is too long: {said}", name=name)
    soonest = min((one.back_in for one in passed), default=math.inf)
    made = NoTargetError(
        f"no target can take the call: {said}",
        rejected=[str(one) for one in passed],
        unsuitable=words <= _UNSUITABLE,
        retry_after=soonest if soonest < math.inf else None,
        name=name,
    )
    made.__cause__ = next((error.__cause__ for error in errors if error.__cause__ is not None), None)
    return made


def _said(passed: Passed, needs: Needs) -> str:
    """Give why a target was passed over in words for people."""
    if passed.error is not None:
        return str(passed.error)
    target = passed.deployment.target
    missing = sorted(needs.capabilities - {*(target.capabilities or ())})
    details = {
        "capabilities": f" (without {', '.join(missing)})",
        "context_window": f" (of {target.context_window} tokens)",
        "dialect": f" ({target.dialect}, not {needs.dialect})",
    }
    return f"{passed}{details.get(passed.why, '')}"


def _passes_in(error: RejectedError) -> float:
    return math.inf if error.retry_after is None else error.retry_after
