"""The attempt loop: whether a failed attempt is made again, and when."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import anyio

from resilient_llm._loop import ROUNDING
from resilient_llm._options import at_least, flag, instance_of, label, number, seconds
from resilient_llm.core.backoff import Backoff, floor_with_jitter
from resilient_llm.core.retry_budget import RetryBudget
from resilient_llm.errors import AttemptError, ConfigurationError, RejectedError
from resilient_llm.message import header
from resilient_llm.ordering import Placement
from resilient_llm.outcome import Outcome
from resilient_llm.policies._keyed import Keyed
from resilient_llm.policies.deadline import Deadline
from resilient_llm.source import abandon

if TYPE_CHECKING:
    from resilient_llm.alternatives import Route
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply

__all__ = ["Retry"]

_MAX_KEYS = 1024


class _Wait(NamedTuple):
    """A backoff that was decided: its length in seconds, and what it comes from or, if infinite, is impossible for."""

    delay: float
    source: str


_AT_ONCE = _Wait(0.0, "")
"""No wait: the next attempt goes to another target, or to another model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Retry:
    """Make a failed attempt again, up to `max_attempts` in all, the first included.

    Waits as long as the provider asks, never less, else by `backoff`; a hint over `max_retry_after`, or a
    wait that does not fit the deadline, ends the call at once. Retries draw on a budget for each target:
    `budget_ratio` of its calls plus `budget_min_per_second`. A failure after which the request may have been
    carried out is retried only with `retry_ambiguous` and for requests that do no harm twice; uploads that
    can be read only once are kept for a second attempt up to `max_replay_body` bytes.

    Raises the last `AttemptError`. Sources: AWS Architecture Blog (full jitter); Finagle's retry budget.
    """

    max_attempts: int = 3
    backoff: Backoff = field(default_factory=Backoff)
    max_retry_after: float = 120.0
    min_remaining: float = 0.1
    """An attempt that would have less than this left until the deadline is not begun."""
    budget_ratio: float = 0.2
    budget_min_per_second: float = 1.0
    retry_ambiguous: bool = True
    idempotency_key: bool = True
    max_replay_body: int = 1024 * 1024
    random: Random = field(default_factory=Random, repr=False)
    name: str = "retry"
    placement: ClassVar[Placement] = Placement.RETRY
    _budgets: Keyed[RetryBudget] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        at_least(1, max_attempts=self.max_attempts)
        at_least(0, max_replay_body=self.max_replay_body)
        seconds(max_retry_after=self.max_retry_after, min_remaining=self.min_remaining, zero=True)
        number(0, 1, budget_ratio=self.budget_ratio)
        number(0, sys.float_info.max, budget_min_per_second=self.budget_min_per_second)
        flag(retry_ambiguous=self.retry_ambiguous, idempotency_key=self.idempotency_key)
        label(name=self.name)
        instance_of(Random, random=self.random)
        if not isinstance(self.backoff, Backoff):
            raise ConfigurationError(f"backoff={self.backoff!r}: allowed is a Backoff")
        budgets = Keyed(
            f"{self.name} budget", "target", self._budget, idle=RetryBudget.idle, max_keys=_MAX_KEYS
        )
        object.__setattr__(self, "_budgets", budgets)

    def check(self, policies: Sequence[object]) -> None:
        """Raise `ConfigurationError` when no retry could ever be made in time."""
        for policy in policies:
            if isinstance(policy, Deadline) and self.max_attempts > 1 and self.backoff.jitter == "none":
                least = self.backoff.initial + self.min_remaining
                if least >= policy.total:
                    msg = (
                        f"no retry fits: the first backoff and min_remaining are {least:g} s together, "
                        f"the deadline is total={policy.total:g} s"
                    )
                    raise ConfigurationError(msg)

    def _budget(self, _key: Hashable) -> RetryBudget:
        return RetryBudget(ratio=self.budget_ratio, min_per_second=self.budget_min_per_second)

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Make attempts until one succeeds or no further one makes sense."""
        budget = call.budget = self._budgets.of(call)
        if call.request.body is None:
            await self._keep_upload(call)
        self._give_key(call)
        failure = None if call.broke is None else AttemptError(call.broke)
        said: AttemptError | None = None
        refusals = 0
        if failure is None:  # else a stream that was read in part is to be gone on with: one more attempt
            budget.deposit(call.loop.time())
        try:
            while True:
                if failure is not None and not await self._wait_after(call, failure, budget):
                    raise said or failure
                attempt = call.attempt(reason="retry" if call.attempts else "initial")
                try:
                    return await attempt.run(call_next)
                except RejectedError:
                    # Refused below, by an open circuit or a full target: no attempt was made of it. What the provider
                    # itself said last tells the caller more than our refusal to ask again.
                    if failure is None:
                        raise
                    refusals += 1
                    if call.route is None or refusals >= self.max_attempts:
                        call.exhausted = True
                        raise said or failure  # noqa: B904 - its cause is the transport's own exception, and stays
                except AttemptError as error:
                    await _let_go(failure)
                    failure = error
                    # Of a prompt that is too long the caller can do something about, whatever fails after it elsewhere.
                    said = said or (error if error.outcome.context_exceeded else None)
                finally:
                    if failure is not None and not attempt.made:
                        call.retries -= 1
        finally:
            del failure, said  # or their tracebacks and this frame would hold each other, and the request

    async def _wait_after(self, call: Call, failure: AttemptError, budget: RetryBudget) -> bool:
        """Wait until the next attempt is to be made; `False`, and at once, when there is to be none."""
        wait = self._decide(call, failure.outcome, budget)
        if wait is None:
            return False
        if failure.reply is not None and not failure.reply.buffered:
            await abandon(failure.reply.stream, None)
            failure.reply = None
        if wait is not _AT_ONCE:
            await self._back_off(call, wait, budget)
        call.retries += 1
        return True

    async def _keep_upload(self, call: Call) -> None:
        """Make a body replayable that can be read only once, if it is not too large."""
        buffer_upload = call.request.buffer_upload
        if buffer_upload is None or self.max_attempts == 1:
            return
        since = call.loop.time()
        try:
            call.request = await buffer_upload(self.max_replay_body)
        finally:
            call.telemetry.step(call, "read upload", since=since)

    def _give_key(self, call: Call) -> None:
        """Let the provider recognise the request when it comes again, where it can."""
        if not self.idempotency_key or call.work is not None:  # a function is given no headers
            return
        request, name = call.request, call.profile.idempotency_header
        if name is not None and header(request.headers, name) is None:
            key = _version_4(self.random.getrandbits(128))
            call.request = request.replace(headers=[*request.headers, (name, key.encode())])
            call.request.dialect = request.dialect  # which does not go by this header

    def _decide(self, call: Call, outcome: Outcome, budget: RetryBudget) -> _Wait | None:
        """Give the wait before the next attempt, or `None` when there is to be none."""
        route = call.route
        if not outcome.retryable and (route is None or not outcome.fails_over):
            return None
        why = self._never_again(call, outcome)
        if why is None:
            tries = call.attempts - call.hedges if route is None else route.tries
            if tries >= self.max_attempts:
                why = "max_attempts"
            elif route is not None and outcome.fails_over and route.elsewhere(call):
                return _AT_ONCE
            elif outcome.retryable or (route is not None and outcome.dead_credential):
                wait = self._wait(call, outcome, tries)
                why = self._not_then(call, wait, budget)
                if why is None:
                    return wait
            else:
                why = "no_other_target"
            if route is not None and outcome.fails_over and route.next_model(call):
                return _AT_ONCE
        call.exhausted = True
        call.telemetry.retry_suppressed(call, why)
        return None

    def _never_again(self, call: Call, outcome: Outcome) -> str | None:
        """Say why the request may not be sent again, whenever and wherever that would be."""
        if not call.request.replayable:
            return "body_not_replayable"
        if outcome.ambiguous and not self.retry_ambiguous:
            return "ambiguous"
        if (outcome.ambiguous or outcome.status is not None) and not call.profile.repeat_safe:
            return "not_repeat_safe"
        if call.remaining() < self.min_remaining:
            return "deadline"
        return None

    def _not_then(self, call: Call, wait: _Wait, budget: RetryBudget) -> str | None:
        """Say why it may not be sent after that wait; else take it out of the budget."""
        if math.isinf(wait.delay):
            return wait.source
        if wait.delay + self.min_remaining > call.remaining():
            return "deadline"
        if call.route is None and any(circuit.reopens_in(call) > wait.delay for circuit in call.circuits):
            return "circuit_open"
        return None if budget.withdraw(call.loop.time()) else "budget"

    def _wait(self, call: Call, outcome: Outcome, tries: int) -> _Wait:
        delay = self.backoff.delay(max(1, tries), self.random)
        if call.route is not None:
            return self._wait_for_target(call, call.route, delay)
        hint = outcome.retry_after
        if hint is None or not hint:  # 0 sets no minimum
            return _Wait(delay, "exponential")
        longest = min(self.max_retry_after, call.remaining() - self.min_remaining)
        if outcome.retry_after_source == "ratelimit-reset":
            # When the bucket will be full again: one request may be let through long before.
            if hint > longest:
                return _Wait(delay, "exponential")
            return _Wait(max(delay, floor_with_jitter(hint, self.random)), "ratelimit_reset")
        if hint > self.max_retry_after:  # the hint itself: its jitter may go past the cap, a provider may not
            return _Wait(math.inf, "retry_after_over_cap")
        return _Wait(max(delay, floor_with_jitter(hint, self.random)), "retry_after")

    def _wait_for_target(self, call: Call, route: Route, delay: float) -> _Wait:
        """Wait until one of the targets may be asked: they keep what they were told, by this call or another."""
        wait, spread = route.again_in(call, delay)
        if math.isinf(wait):
            return _Wait(math.inf, "no_other_target")
        if wait > self.max_retry_after + ROUNDING:  # without its jitter, as above
            return _Wait(math.inf, "retry_after_over_cap")
        if wait <= delay:
            return _Wait(wait, "exponential")
        return _Wait(wait + self.random.uniform(0.0, spread), "target")

    async def _back_off(self, call: Call, wait: _Wait, budget: RetryBudget) -> None:
        since = call.loop.time()
        if call.route is not None:
            call.route.begin_round()
        try:
            await anyio.sleep(wait.delay)
        finally:
            call.telemetry.backoff(
                call,
                since=since,
                planned=wait.delay,
                source=wait.source,
                next_attempt=call.attempts + 1,
                budget=budget.remaining(call.loop.time()),
            )


async def _let_go(failure: AttemptError | None) -> None:
    """Close the reply of a failure that another has come after."""
    if failure is not None and failure.reply is not None:
        await abandon(failure.reply.stream, None)


_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))
"""Of a digit the two bits that are random, after those that say it is such a UUID."""


def _version_4(bits: int) -> str:
    """Write random bits as a UUID (RFC 9562, 5.4); an object of it would cost as much as all else that a retry does."""
    text = bits.to_bytes(16).hex()
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-{_VARIANT[text[16]]}{text[17:20]}-{text[20:]}"
