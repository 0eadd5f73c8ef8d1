"""The list of models, as each provider's SDK reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import unquote

from resilient_llm.sidecar.refusal import RefusedError

__all__ = ["model_list"]


def model_list(names: Sequence[str], one: str, *, anthropic: bool) -> bytes:
    """Give the list of models, or where `one` is named, percent-encoded, that one; raises `RefusedError` without it."""
    make = _anthropic if anthropic else _openai
    if one:
        name = unquote(one)
        if name not in names:
            raise RefusedError(404, "model_not_found", "This model does not exist, or is not for you.")
        return json.dumps(make(name)).encode()
    data = [make(name) for name in names]
    if not anthropic:
        return json.dumps({"object": "list", "data": data}).encode()
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return json.dumps({"data": data, "has_more": False, **ends}).encode()


def _openai(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "resilient-llm"}


def _anthropic(name: str) -> dict[str, object]:
    return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
