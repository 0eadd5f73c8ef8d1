"""What spans say of a call and of an attempt: facts in, attributes out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from resilient_llm.telemetry import names
from resilient_llm.telemetry.words import (
    ATTEMPT_ERRORS,
    CALL_ERRORS,
    attempt_outcome,
    call_outcome,
    error_type,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.util.types import AttributeValue

    from resilient_llm.call import Call
    from resilient_llm.outcome import Outcome, Usage
    from resilient_llm.target import Target
    from resilient_llm.telemetry.silent import Routing

__all__ = [
    "Attributes",
    "attempt_begun",
    "attempt_ended",
    "call_begun",
    "call_ended",
    "gen_ai_ended",
    "routed",
]

Attributes: TypeAlias = "dict[str, AttributeValue]"


def call_begun(call: Call) -> Attributes:
    """Say what is asked of whom, in the words of the conventions; samplers see no more than this."""
    profile = call.profile
    attributes: Attributes = {
        names.OPERATION: profile.operation,
        names.PROVIDER: profile.provider,
        **_server(call.target),
    }
    if profile.model is not None:
        attributes[names.REQUEST_MODEL] = profile.model
    if profile.stream:
        attributes[names.REQUEST_STREAM] = True
    return attributes


def call_ended(call: Call, outcome: Outcome) -> Attributes:
    """Say how a call ended and what it took."""
    word = call_outcome(call, outcome)
    attributes: Attributes = {
        names.OUTCOME: word,
        names.ATTEMPTS: call.attempts,
        names.RETRIES: call.retries,
        names.HEDGES: call.hedges,
        names.FALLBACKS: call.fallbacks,
        names.RETRY_DELAY: call.retry_delay,
        names.WAIT_TIME: call.wait_time,
    }
    if call.cost:
        attributes[names.COST] = call.cost
    if outcome.usage is not None and outcome.usage.estimated:
        attributes[names.USAGE_ESTIMATED] = True
    if word in CALL_ERRORS:
        attributes[names.ERROR_TYPE] = error_type(outcome)
    return attributes


def gen_ai_ended(
    outcome: Outcome, answer: Mapping[str, AttributeValue | None], time_to_first_chunk: float | None
) -> Attributes:
    """Say what came back, in the words of the conventions; a stream that was cut off ends with `error`."""
    attributes: Attributes = {} if outcome.usage is None else _tokens(outcome.usage)
    attributes.update({name: value for name, value in answer.items() if value})
    if time_to_first_chunk is not None:
        attributes[names.TIME_TO_FIRST_CHUNK] = time_to_first_chunk
        if not outcome.ok:
            attributes[names.FINISH_REASONS] = ("error",)
    return attributes


def attempt_begun(attempt: Call) -> Attributes:
    """Say which attempt this is, of whom and why."""
    profile = attempt.profile
    attributes: Attributes = {
        names.ATTEMPT_NUMBER: attempt.number,
        names.ATTEMPT_TARGET: attempt.target.name,
        names.ATTEMPT_PROVIDER: profile.provider,
        names.ATTEMPT_REASON: attempt.reason,
        **_server(attempt.target),
    }
    if profile.model is not None:
        attributes[names.ATTEMPT_MODEL] = profile.model
    if attempt.number > 1:
        attributes[names.RESEND_COUNT] = attempt.number - 1
    return attributes


def attempt_ended(outcome: Outcome, status: int | None, time_to_first_chunk: float | None) -> Attributes:
    """Say how an attempt ended; `status` is that of its reply, if one came."""
    word = attempt_outcome(outcome)
    attributes: Attributes = {names.ATTEMPT_OUTCOME: word}
    if status is None:
        status = outcome.status
    if status is not None:
        attributes[names.STATUS_CODE] = status
    if outcome.retry_after is not None and math.isfinite(outcome.retry_after):
        attributes[names.ATTEMPT_RETRY_AFTER] = outcome.retry_after
    if outcome.ambiguous:
        attributes[names.ATTEMPT_POSSIBLY_BILLED] = True
    if time_to_first_chunk is not None:
        attributes[names.ATTEMPT_TIME_TO_FIRST_CHUNK] = time_to_first_chunk
    if outcome.usage is not None and outcome.usage.estimated:
        attributes[names.USAGE_ESTIMATED] = True
    if word in ATTEMPT_ERRORS:
        attributes[names.ERROR_TYPE] = error_type(outcome)
    return attributes


def routed(routing: Routing) -> Attributes:
    """Say which target was chosen, from which, and why not the others."""
    attributes: Attributes = {
        names.ROUTE_STRATEGY: routing.strategy,
        names.ROUTE_REASON: routing.reason,
        names.ROUTE_CANDIDATES: routing.candidates,
        names.ROUTE_SCORES: routing.scores,
        names.ROUTE_REJECTED: routing.rejected,
    }
    if routing.selected is not None:
        attributes[names.ROUTE_SELECTED] = routing.selected
    if routing.previous is not None:
        attributes[names.ROUTE_FROM] = routing.previous
    return attributes


def _server(target: Target) -> Attributes:
    if not target.address:
        return {}
    if target.port is None:
        return {names.SERVER_ADDRESS: target.address}
    return {names.SERVER_ADDRESS: target.address, names.SERVER_PORT: target.port}


def _tokens(usage: Usage) -> Attributes:
    counts = {
        names.INPUT_TOKENS: usage.input_tokens,
        names.OUTPUT_TOKENS: usage.output_tokens,
        names.CACHE_READ_TOKENS: usage.cached_tokens,
    }
    return {name: tokens for name, tokens in counts.items() if tokens is not None}
