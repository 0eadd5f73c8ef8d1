"""What a request asks for, in the words of no provider. Reading it from a request is a dialect's business."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Profile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a request asks for, as its provider's dialect reads it."""

    provider: str = "unknown"
    operation: str = "request"
    model: str | None = None
    stream: bool = False
    repeat_safe: bool = True
    """Whether carrying it out twice does no harm beyond its price."""
    idempotency_header: bytes | None = None
    """The header with which the provider recognises a repeated request, where it does."""
    resumable: bool = False
    """Whether the rest of its answer could be asked for: one text, in an API where the model's words may come last."""
