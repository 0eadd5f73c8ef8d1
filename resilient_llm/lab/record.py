"""What became of one call, as the client that made it saw it. Facts only, summed up in `report`."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilient_llm.lab.exchange import Exchange

__all__ = ["CallRecord"]


@dataclass(slots=True, kw_only=True, eq=False)
class CallRecord:
    """One call. Times are in seconds since the simulation began."""

    number: int
    tenant: str | None
    model: str
    started: float
    first_token: float | None = None
    """When the first bytes of the answer came; None when none did."""
    ended: float = 0.0
    """When the answer was read to its end, or the client knew that there is none."""
    outcome: str = "failed"
    """How it ended, in the words of a call's span: success, fallback, failed, exhausted, rejected, timeout ..."""
    error_type: str | None = None
    status: int | None = None
    """The status that the client saw; None when its HTTP library raised an exception."""
    attempts: int = 0
    exchanges: list[Exchange] = field(default_factory=list, repr=False)
    """The requests that were sent for it."""

    @property
    def ok(self) -> bool:
        """Tell whether the client got a whole answer."""
        return self.outcome in ("success", "fallback")

    @property
    def seconds(self) -> float:
        """Give how long it took."""
        return self.ended - self.started

    @property
    def to_first_token(self) -> float | None:
        """Give how long its first bytes took."""
        return None if self.first_token is None else self.first_token - self.started

    @property
    def answered_by(self) -> str | None:
        """Give the upstream whose answer it got; None where nobody's, or nobody was asked."""
        if not self.ok:
            return None
        return next((sent.upstream for sent in reversed(self.exchanges) if sent.answered), None)

    @property
    def usd(self) -> float:
        """Give what all that was sent for it cost."""
        return sum(sent.usd for sent in self.exchanges)
