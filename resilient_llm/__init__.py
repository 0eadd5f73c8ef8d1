"""Resilience for LLM calls: policies at the ASGI door, the HTTP client door and around any callable."""

from resilient_llm.call import Call, CallNext, Clocks, Policy, Profile, Target
from resilient_llm.context import ambient
from resilient_llm.core.backoff import Backoff
from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.core.quota import LimitLevel
from resilient_llm.errors import (
    AttemptError,
    BudgetExceededError,
    BulkheadFullError,
    CircuitOpenError,
    ConcurrencyLimitError,
    ConfigurationError,
    ContextWindowError,
    CostExceedsCapacityError,
    DeadlineExceededError,
    EventLoopError,
    NoTargetError,
    RateLimitedError,
    RejectedError,
    ResilientLLMError,
    UnknownModelError,
    UnknownTenantError,
)
from resilient_llm.message import Reply, Request
from resilient_llm.outcome import Outcome, Scope, Usage, Verdict
from resilient_llm.pipeline import Pipeline, PipelineDescription, PolicyDescription
from resilient_llm.policies import (
    AttemptTimeout,
    Bulkhead,
    CircuitBreaker,
    ConcurrencyLimit,
    Deadline,
    Limit,
    RateLimit,
    Retry,
    Stream,
    TokenEstimate,
)
from resilient_llm.telemetry import Telemetry

__version__ = "0.1.0"

__all__ = [
    "AttemptError",
    "AttemptTimeout",
    "Backoff",
    "BudgetExceededError",
    "Bulkhead",
    "BulkheadFullError",
    "Call",
    "CallNext",
    "CircuitBreaker",
    "CircuitOpenError",
    "CircuitState",
    "Clocks",
    "ConcurrencyLimit",
    "ConcurrencyLimitError",
    "ConfigurationError",
    "ContextWindowError",
    "CostExceedsCapacityError",
    "Deadline",
    "DeadlineExceededError",
    "EventLoopError",
    "Limit",
    "LimitLevel",
    "NoTargetError",
    "Outcome",
    "Pipeline",
    "PipelineDescription",
    "Policy",
    "PolicyDescription",
    "Profile",
    "RateLimit",
    "RateLimitedError",
    "RejectedError",
    "Reply",
    "Request",
    "ResilientLLMError",
    "Retry",
    "Scope",
    "Stream",
    "Target",
    "Telemetry",
    "TokenEstimate",
    "UnknownModelError",
    "UnknownTenantError",
    "Usage",
    "Verdict",
    "__version__",
    "ambient",
]
