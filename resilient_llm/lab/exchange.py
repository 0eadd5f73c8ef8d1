"""What became of one request at an upstream: a line of the network's log. Facts only, summed up in `report`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Exchange"]


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One request as the upstream saw it. Times are in seconds since the simulation began."""

    call: object
    """What the request was made for: the `template` of the `Request`."""
    upstream: str
    model: str
    key: str | None
    arrived: float
    ended: float | None = None
    """When its last byte was there, or it failed, or the client went away; None while it is in flight."""
    status: int | None = None
    """The status of the response; None when there was none."""
    failure: str | None = None
    """How it failed: a `FailureKind`, `rate_limit`, `capacity`, `context_window`, or `abandoned` by its client."""
    input_tokens: int = 0
    """The tokens of the prompt, once a reply was begun."""
    output_tokens: int = 0
    """The tokens of the reply that were made, whether the client has seen them or not."""
    usd: float = 0.0

    @property
    def answered(self) -> bool:
        """Tell whether a whole answer went out."""
        return self.ended is not None and self.failure is None
