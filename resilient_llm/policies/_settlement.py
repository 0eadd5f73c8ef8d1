"""What a finished call really took of a rate limit, by how it ended.

Nothing is given back in here; see the table in docs/rate-limit.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_llm.outcome import Outcome, Scope, Usage, Verdict
from resilient_llm.policies.tokens import MOST_TOKENS, Estimate, estimate_once, has_output, prompt_tokens

if TYPE_CHECKING:
    from resilient_llm.call import Call

__all__ = ["never_sent", "tokens_used"]

_SUCCESS = Verdict.SUCCESS
_INTERRUPTIONS = frozenset({"cancelled", "deadline_exceeded"})
_NO_CONNECTION = frozenset({"pool_timeout", "too_many_open_files"})
"""Neutral, as it says nothing of the target, but no refusal of a policy's."""


def never_sent(call: Call, outcome: Outcome) -> bool:
    """Tell whether nothing of a call ever reached the provider, or at the ASGI door the app."""
    if outcome.error_type in _NO_CONNECTION or (
        outcome.verdict is Verdict.FAILURE and outcome.status is None
    ):
        return not outcome.ambiguous and not call.inbound and _only_attempt(call)
    if outcome.verdict is not Verdict.NEUTRAL or outcome.scope is not Scope.LOCAL:
        return False
    if outcome.error_type in _INTERRUPTIONS and call.sent is None:
        # The door does not say, so that an attempt was begun has to do.
        return not (call.inbound or call.parent is not None or call.attempts)
    return not call.sent


def tokens_used(call: Call, outcome: Outcome, estimate: Estimate) -> float | None:
    """Say how many tokens a call that was sent used; `None` when nobody knows, and its estimate has to stand."""
    used = None if outcome.usage is None else _reported(call, outcome.usage, estimate)
    if used is not None:
        return used
    if outcome.verdict is _SUCCESS:
        return None
    refused = outcome.status is not None and outcome.verdict in (Verdict.THROTTLED, Verdict.FATAL)
    failed = outcome.status is not None and outcome.verdict is Verdict.FAILURE and not outcome.ambiguous
    if (refused or failed) and call.first_content is None and not call.inbound and _only_attempt(call):
        return 0.0
    return None


def _reported(call: Call, usage: Usage, estimate: Estimate) -> float | None:
    """Say what usage tells of all tokens; what is only partly known, or estimated, never lowers the call's estimate."""
    read, written = _count(usage.input_tokens), _count(usage.output_tokens)
    if read is not None and not has_output(call):
        return read + (written or 0.0)
    if read is not None and written is not None and not usage.estimated:
        return read + written
    if read is None:
        read = prompt_tokens(call, estimate)
    known = read + (written or 0.0)
    return known if known > estimate_once(call, estimate) else None


def _count(tokens: float | None) -> float | None:
    """Give a count that can be one; anybody's `classify_result` may say anything."""
    return float(tokens) if isinstance(tokens, int | float) and 0 <= tokens <= MOST_TOKENS else None


def _only_attempt(call: Call) -> bool:
    return call.parent is not None or call.attempts <= 1
