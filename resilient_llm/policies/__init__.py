"""One file per policy: thin shells that wait, record and call on the pure cores.

A policy knows calls and outcomes; it knows no HTTP library, no provider and no ASGI message.
"""

from resilient_llm.policies.attempt_timeout import AttemptTimeout
from resilient_llm.policies.budget import Budget
from resilient_llm.policies.bulkhead import Bulkhead
from resilient_llm.policies.cache import Cache
from resilient_llm.policies.circuit_breaker import CircuitBreaker
from resilient_llm.policies.coalesce import Coalesce
from resilient_llm.policies.concurrency_limit import ConcurrencyLimit
from resilient_llm.policies.context_fit import ContextFit
from resilient_llm.policies.deadline import Deadline
from resilient_llm.policies.hedge import Hedge
from resilient_llm.policies.idempotency import Idempotency
from resilient_llm.policies.ledger import BudgetLedger, MemoryLedger
from resilient_llm.policies.limit import Limit
from resilient_llm.policies.rate_limit import RateLimit
from resilient_llm.policies.reply_store import MemoryReplyStore, ReplyStore
from resilient_llm.policies.retry import Retry
from resilient_llm.policies.stream import Stream
from resilient_llm.policies.tokens import TokenEstimate

__all__ = [
    "AttemptTimeout",
    "Budget",
    "BudgetLedger",
    "Bulkhead",
    "Cache",
    "CircuitBreaker",
    "Coalesce",
    "ConcurrencyLimit",
    "ContextFit",
    "Deadline",
    "Hedge",
    "Idempotency",
    "Limit",
    "MemoryLedger",
    "MemoryReplyStore",
    "RateLimit",
    "ReplyStore",
    "Retry",
    "Stream",
    "TokenEstimate",
]
