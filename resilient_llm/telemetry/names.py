"""Every name this library gives to telemetry, in one table.

What starts with `resilient_llm.` is our own; the rest comes from OpenTelemetry's conventions for generative AI
and HTTP, of which the former are still moving. Nothing is recorded in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

SCOPE: Final = "resilient_llm"

# Conventions: attributes, the same in every set of metric names

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105 - tokens of text
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
STATUS_CODE: Final = "http.response.status_code"
RESEND_COUNT: Final = "http.request.resend_count"

# Ours, of a call and of an attempt

USAGE_ESTIMATED: Final = "resilient_llm.usage.estimated"
"""That nobody said how many tokens were used: they are estimated by the length of the text."""

# Ours, of a call

NESTED_CALL: Final = "resilient_llm.call"
"""The call's span under an instrumentation that already says what is asked."""
TENANT: Final = "resilient_llm.tenant"
OUTCOME: Final = "resilient_llm.outcome"
ATTEMPTS: Final = "resilient_llm.attempts"
RETRIES: Final = "resilient_llm.retries"
HEDGES: Final = "resilient_llm.hedges"
FALLBACKS: Final = "resilient_llm.fallbacks"
RETRY_DELAY: Final = "resilient_llm.retry_delay"
WAIT_TIME: Final = "resilient_llm.wait_time"

COST: Final = "resilient_llm.cost.usd"

# Ours, of a routing decision

ROUTE_STRATEGY: Final = "resilient_llm.route.strategy"
ROUTE_REASON: Final = "resilient_llm.route.reason"
ROUTE_CANDIDATES: Final = "resilient_llm.route.candidates"
ROUTE_SCORES: Final = "resilient_llm.route.scores"
ROUTE_REJECTED: Final = "resilient_llm.route.rejected"
ROUTE_SELECTED: Final = "resilient_llm.route.selected"
ROUTE_FROM: Final = "resilient_llm.route.from"

# Ours, of an attempt

ATTEMPT_NUMBER: Final = "resilient_llm.attempt.number"
ATTEMPT_TARGET: Final = "resilient_llm.attempt.target"
ATTEMPT_PROVIDER: Final = "resilient_llm.attempt.provider"
ATTEMPT_MODEL: Final = "resilient_llm.attempt.model"
ATTEMPT_REASON: Final = "resilient_llm.attempt.reason"
ATTEMPT_OUTCOME: Final = "resilient_llm.attempt.outcome"
ATTEMPT_RETRY_AFTER: Final = "resilient_llm.attempt.retry_after"
ATTEMPT_TIME_TO_FIRST_CHUNK: Final = "resilient_llm.attempt.time_to_first_chunk"
ATTEMPT_POSSIBLY_BILLED: Final = "resilient_llm.attempt.possibly_billed"

# Ours, of waits and backoffs

LIMITER_NAME: Final = "resilient_llm.limiter.name"
LIMIT_UNIT: Final = "resilient_llm.limit.unit"
WAIT_OUTCOME: Final = "resilient_llm.wait.outcome"
WAIT_QUEUE_DEPTH: Final = "resilient_llm.wait.queue_depth"
BACKOFF_PLANNED: Final = "resilient_llm.backoff.planned"
BACKOFF_SOURCE: Final = "resilient_llm.backoff.source"
BACKOFF_NEXT_ATTEMPT: Final = "resilient_llm.backoff.next_attempt"
RETRY_BUDGET_REMAINING: Final = "resilient_llm.retry_budget.remaining"

# Our events, without the prefix, and what they say

COMMIT: Final = "commit"
REJECTED: Final = "rejected"
RETRY_SUPPRESSED: Final = "retry_suppressed"
HEDGE_SUPPRESSED: Final = "hedge_suppressed"
BREAKER_STATE_CHANGE: Final = "breaker.state_change"
REASON: Final = "resilient_llm.reason"
DRY_RUN: Final = "resilient_llm.dry_run"
BREAKER_NAME: Final = "resilient_llm.breaker.name"
BREAKER_FROM: Final = "resilient_llm.breaker.from"
BREAKER_TO: Final = "resilient_llm.breaker.to"
BREAKER_REASON: Final = "resilient_llm.breaker.reason"

# Our events of choosing a model and making a prompt fit, without the prefix, and what they say

TIER_CHOSEN: Final = "tier.chosen"
TIER_CLASS: Final = "resilient_llm.tier.class"
TIER_SCORE: Final = "resilient_llm.tier.score"
TIER_CONTRIBUTIONS: Final = "resilient_llm.tier.contributions"
TIER_ESTIMATED_COST: Final = "resilient_llm.tier.estimated_cost.usd"
CONTEXT_TRIMMED: Final = "context.trimmed"
CONTEXT_MOVED: Final = "context.moved"
CONTEXT_WINDOW: Final = "resilient_llm.context.window"
CONTEXT_TOKENS: Final = "resilient_llm.context.tokens"
CONTEXT_REMOVED_TOKENS: Final = "resilient_llm.context.removed_tokens"
CONTEXT_REMOVED_MESSAGES: Final = "resilient_llm.context.removed_messages"

# Our event of a canary, without the prefix, and what it and its change say

CANARY: Final = "canary"
CANARY_NAME: Final = "resilient_llm.canary.name"
CANARY_MODEL: Final = "resilient_llm.canary.model"
CANARY_SHARE: Final = "resilient_llm.canary.share"
CANARY_FROM: Final = "resilient_llm.canary.from"
CANARY_STATE: Final = "resilient_llm.canary.state"
CANARY_REASON: Final = "resilient_llm.canary.reason"

# Our event of a target that was changed by hand, without the prefix, and what it says
TARGET_CHANGE: Final = "target.change"
TARGET_NAME: Final = "resilient_llm.target.name"
TARGET_CHANGED: Final = "resilient_llm.target.changed"
TARGET_WEIGHT: Final = "resilient_llm.target.weight"

# Our event of a store that is given up on or found well again, without the prefix, and what it and its gauges say

STORE_STATE_CHANGE: Final = "store.state_change"
STORE_NAME: Final = "resilient_llm.store.name"
STORE_STATE: Final = "resilient_llm.store.state"

# What the events of a budget say

BUDGET_SPENT_RATIO: Final = "resilient_llm.budget.spent_ratio"

# Our metrics

CALL_RETRIES: Final = "resilient_llm.call.retries"
CALL_HEDGES: Final = "resilient_llm.call.hedges"
CALL_RETRY_DELAY: Final = "resilient_llm.call.retry_delay"
ATTEMPT_DURATION: Final = "resilient_llm.attempt.duration"
ATTEMPT_DISCARDED_TOKENS: Final = "resilient_llm.attempt.discarded_tokens"
WAIT_DURATION: Final = "resilient_llm.wait.duration"
REJECTIONS: Final = "resilient_llm.rejections"
REQUEST_REFUSALS: Final = "resilient_llm.request.refusals"
BREAKER_TRANSITIONS: Final = "resilient_llm.breaker.transitions"

# Our gauges, without the prefix

BREAKER_STATE: Final = "breaker.state"
BULKHEAD_ACTIVE: Final = "bulkhead.active"
BULKHEAD_QUEUED: Final = "bulkhead.queued"

# Conventions: metrics, by set

Semconv: TypeAlias = Literal["released", "inference"]
"""A set of metric names: what dashboards have long had, or what the conventions will call an inference."""

INFERENCES: Final = frozenset({"chat", "generate_content", "text_completion"})
"""The operations that the newer set renames; all others keep the older names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenAIMetricNames:
    """Name one set's metrics. Tokens are either one histogram by `gen_ai.token.type`, or a counter for each type."""

    duration: str
    time_to_first_chunk: str
    token_usage: str | None = None
    input_tokens: str | None = None
    output_tokens: str | None = None
    cache_read_tokens: str | None = None


METRICS: Final[Mapping[Semconv, GenAIMetricNames]] = {
    "released": GenAIMetricNames(
        duration="gen_ai.client.operation.duration",
        time_to_first_chunk="gen_ai.client.operation.time_to_first_chunk",
        token_usage="gen_ai.client.token.usage",  # noqa: S106 - tokens of text
    ),
    "inference": GenAIMetricNames(
        duration="gen_ai.client.inference.duration",
        time_to_first_chunk="gen_ai.client.inference.time_to_first_chunk",
        input_tokens="gen_ai.client.inference.usage.input_tokens",
        output_tokens="gen_ai.client.inference.usage.output_tokens",
        cache_read_tokens="gen_ai.client.inference.usage.cache_read.input_tokens",
    ),
}
