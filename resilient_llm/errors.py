"""Every exception this library raises.

ResilientLLMError
├── ConfigurationError          a pipeline or option that cannot work, found when it is built (also a ValueError)
├── EventLoopError              used from a second event loop or after a fork (also a RuntimeError)
├── RejectedError               refused on this side without any I/O; carries `retry_after`
│   ├── BudgetExceededError
│   ├── BulkheadFullError
│   ├── CircuitOpenError
│   ├── ConcurrencyLimitError
│   ├── ContextWindowError
│   ├── CostExceedsCapacityError
│   ├── IdempotencyKeyError
│   ├── NoTargetError
│   ├── RateLimitedError
│   ├── StoreUnavailableError
│   ├── UnknownModelError
│   └── UnknownTenantError
├── DeadlineExceededError       the call's total deadline passed (also a TimeoutError)
└── AttemptError                the provider answered with a failure, or could not be reached
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient_llm.core.budget import BudgetLevel
    from resilient_llm.core.quota import LimitLevel
    from resilient_llm.message import Reply
    from resilient_llm.outcome import Outcome

__all__ = [
    "AttemptError",
    "BudgetExceededError",
    "BulkheadFullError",
    "CircuitOpenError",
    "ConcurrencyLimitError",
    "ConfigurationError",
    "ContextWindowError",
    "CostExceedsCapacityError",
    "DeadlineExceededError",
    "EventLoopError",
    "IdempotencyKeyError",
    "NoTargetError",
    "RateLimitedError",
    "RejectedError",
    "ResilientLLMError",
    "StoreUnavailableError",
    "UnknownModelError",
    "UnknownTenantError",
]


class ResilientLLMError(Exception):
    """Base of every exception this library raises.

    A copy, or what comes out of a pickle, has the type, the text and the attributes; causes are left behind, as
    those of all exceptions are.
    """

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], object]:
        # Exceptions are made again by their constructor and the text alone, and those of ours ask for more.
        return _made_again, (type(self), *self.args), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def _made_again(kind: type[ResilientLLMError], *args: object) -> ResilientLLMError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigurationError(ResilientLLMError, ValueError):
    """A pipeline or an option that cannot work; raised when it is built."""


class EventLoopError(ResilientLLMError, RuntimeError):
    """A policy is in use by another event loop that is still running, or was carried over a fork."""


class RejectedError(ResilientLLMError):
    """A call was refused on this side, without any I/O.

    `retry_after` is in seconds, or `None` when waiting would not help. `reason` is a short, stable
    word for telemetry. `callers_fault` tells 429 (the caller is over its own limit) from 503
    (the service behind is full or out of order).
    """

    reason: ClassVar[str] = "rejected"
    callers_fault: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after: float | None = None, name: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.name = name

    @property
    def status(self) -> int:
        """Give the HTTP status that says this: 429 or 503."""
        return 429 if self.callers_fault else 503

    @property
    def told(self) -> str:
        """Give what a reply says of this to whoever called, who may be a stranger: the error's own text."""
        return str(self)


class BudgetExceededError(RejectedError):
    """A tenant has spent, or reserved, all that it may in a period; `retry_after` is when the next one begins."""

    reason = "budget_exceeded"
    callers_fault = True
    level: BudgetLevel | None = None
    """The cap that is in the way; `None` where it is that no price is known."""


class BulkheadFullError(RejectedError):
    """A bulkhead had no free slot, and its queue was full or the wait in it too long."""

    reason = "bulkhead_full"
    callers_fault = True


class CircuitOpenError(RejectedError):
    """A circuit breaker is open; `retry_after` is when it will let a probe through."""

    reason = "circuit_open"


class ConcurrencyLimitError(RejectedError):
    """A target has as many calls in flight as it can take, and the queue was full or the wait in it too long."""

    reason = "concurrency_limit"


class ContextWindowError(RejectedError):
    """A prompt does not fit the context window of any model that the call may go to."""

    reason = "context_length_exceeded"
    callers_fault = True

    @property
    def status(self) -> int:
        """Give the HTTP status that says this, the one providers give: 400."""
        return 400


class CostExceedsCapacityError(RejectedError):
    """A call would use more of a limit than it ever has at once: waiting or coming back is useless.

    `level` is the limit, and `cost` what the call would use of it.
    """

    reason = "cost_exceeds_capacity"
    callers_fault = True

    def __init__(self, message: str, *, level: LimitLevel, cost: float, name: str | None = None) -> None:
        super().__init__(message, name=name)
        self.level = level
        self.cost = cost

    @property
    def status(self) -> int:
        """Give the HTTP status that says this: 413."""
        return 413


class IdempotencyKeyError(RejectedError):
    """A caller's `Idempotency-Key` stands for another request, or with `in_flight` for one that takes too long."""

    reason = "idempotency_key"
    callers_fault = True

    def __init__(
        self,
        message: str,
        *,
        in_flight: bool = False,
        retry_after: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after, name=name)
        self.in_flight = in_flight

    @property
    def status(self) -> int:
        """Give the HTTP status that says this: 422, or 409 while the first request is in flight."""
        return 409 if self.in_flight else 422


class NoTargetError(RejectedError):
    """No target can take the call now; `rejected` says why of each, as `target:why`.

    With `unsuitable` none ever can: it asks for what they do not have.
    """

    reason = "no_target"

    def __init__(
        self,
        message: str,
        *,
        rejected: Sequence[str] = (),
        unsuitable: bool = False,
        retry_after: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after, name=name)
        self.rejected = tuple(rejected)
        self.unsuitable = unsuitable

    @property
    def status(self) -> int:
        """Give the HTTP status that says this: 503, or 400 for a call that no target is made for."""
        return 400 if self.unsuitable else 503


class RateLimitedError(RejectedError):
    """A rate limit has too little left, and the wait for more is too long or its queue full.

    `level` is the limit that refused, the one that takes longest; `levels` are all that the call draws on, and
    what remains of each. After `retry_after` the same call would pass if nobody else came; where others are before it,
    not sooner than that.
    """

    reason = "rate_limited"
    callers_fault = True

    def __init__(
        self,
        message: str,
        *,
        level: LimitLevel,
        levels: tuple[LimitLevel, ...],
        retry_after: float,
        name: str | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after, name=name)
        self.level = level
        self.levels = levels

    @property
    def limit(self) -> str:
        """Give the name of the limit that refused: requests of tenant, tokens of account ..."""
        return self.level.name

    @property
    def remaining(self) -> float:
        """Give what remains of the limit that refused; less than 0 in debt."""
        return self.level.remaining


class StoreUnavailableError(RejectedError):
    """The store that processes share did not decide in time, or cannot; `retry_after` is when it is asked again."""

    reason = "store_unavailable"

    @property
    def told(self) -> str:
        """Give what a reply says of this: nothing of where the store is, nor of what is wrong there."""
        return "the limits that this call is under cannot be checked at the moment"


class UnknownModelError(RejectedError):
    """A call asks for a model that no target is declared for."""

    reason = "model_not_found"
    callers_fault = True

    @property
    def status(self) -> int:
        """Give the HTTP status that says this, the one providers give: 404."""
        return 404


class UnknownTenantError(RejectedError):
    """A request came without a tenant, or with one nobody knows, where one is required."""

    reason = "unknown_tenant"
    callers_fault = True

    @property
    def status(self) -> int:
        """Give the HTTP status that says this: 401."""
        return 401


class DeadlineExceededError(ResilientLLMError, TimeoutError):
    """A call's total deadline passed."""


class AttemptError(ResilientLLMError):
    """An attempt failed.

    Carries what the failure meant (`outcome`) and, where the provider answered, its `reply`.
    A failure of the transport is the `__cause__`. A copy has no `reply`: its stream can be read once, and here.
    """

    def __init__(self, outcome: Outcome, *, reply: Reply | None = None) -> None:
        super().__init__(outcome.error_type or outcome.verdict.value)
        self.outcome = outcome
        self.reply = reply

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "reply": None}
