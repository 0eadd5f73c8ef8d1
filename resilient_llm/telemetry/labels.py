"""Metric labels that stay few, whatever users, providers and configurations send.

Every distinct value is a time series of its own for as long as the process lives, and a model or a tenant can be
any string a caller likes. What a label is called, and which metric has it, is decided elsewhere.
"""

from __future__ import annotations

from resilient_llm._kept import LONGEST_MODEL

__all__ = ["MAX_VALUES", "OTHER", "Labels"]

MAX_VALUES = 100
OTHER = "other"


class Labels:
    """Let each label have the first `MAX_VALUES` values that come; any further one is `other`, and so are endless ones.

    Those are the ones longer than any model's name is kept: each is written out many times, once for every bucket.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[str, set[str]] = {}

    def bound(self, label: str, value: str) -> str:
        """Give `value`, or `other` when there have been too many before it, or it is too long."""
        values = self._values.setdefault(label, set())
        if value in values:
            return value
        if len(values) >= MAX_VALUES or len(value) > LONGEST_MODEL:
            return OTHER
        values.add(value)
        return value
