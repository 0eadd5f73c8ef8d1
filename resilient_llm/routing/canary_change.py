"""What is told of a canary that has changed: to the application, in a log and on a span.

When one changes is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from resilient_llm.core.canary import RolloutState
from resilient_llm.core.sample import Sample
from resilient_llm.telemetry.names import (
    CANARY_FROM,
    CANARY_MODEL,
    CANARY_NAME,
    CANARY_REASON,
    CANARY_SHARE,
    CANARY_STATE,
)

__all__ = ["CanaryChange"]


class CanaryChange(NamedTuple):
    """Say how a canary has changed, and why.

    `reason` is `passed` (a step), the name of the bound of the SLO that was violated, `cool_off` (it begins again),
    or `set_by_hand`, `promoted_by_hand`, `rolled_back_by_hand`, `resumed_by_hand`. `seen` and `seen_of_baseline`
    are what the calls in between came to.
    """

    name: str
    model: str
    candidate: str
    from_state: RolloutState
    to_state: RolloutState
    from_share: float
    to_share: float
    reason: str
    seen: Sample
    seen_of_baseline: Sample

    def __str__(self) -> str:
        seen, usual = self.seen, self.seen_of_baseline
        return (
            f"canary={self.name!r} model={self.model!r} candidate={self.candidate!r} state={self.to_state.value} "
            f"share={self.to_share:g} from={self.from_share:g} reason={self.reason!r} {_told(seen, '')} "
            f"{_told(usual, 'baseline_')}"
        )

    def attributes(self) -> Mapping[str, str | float]:
        """Say it in the words of an event on a span."""
        return {
            CANARY_NAME: self.name,
            CANARY_MODEL: self.candidate,
            CANARY_STATE: self.to_state.value,
            CANARY_SHARE: self.to_share,
            CANARY_FROM: self.from_share,
            CANARY_REASON: self.reason,
        }


def _told(sample: Sample, prefix: str) -> str:
    said = f"{prefix}calls={sample.calls} {prefix}errors={sample.errors} {prefix}client_errors={sample.client_errors}"
    p99 = sample.p99_first_token
    if p99 is not None:
        said += f" {prefix}p99_first_token={p99:.3g}"
    return f"{said} {prefix}mean_cost={sample.mean_cost:.3g}" if sample.priced else said
