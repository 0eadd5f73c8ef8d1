"""What is counted and timed, and under which labels."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from resilient_llm.telemetry import names
from resilient_llm.telemetry.instruments import Instruments, Labelled
from resilient_llm.telemetry.labels import OTHER
from resilient_llm.telemetry.safety import quiet
from resilient_llm.telemetry.words import (
    ATTEMPT_ERRORS,
    CALL_ERRORS,
    attempt_outcome,
    call_outcome,
    error_type,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from resilient_llm.call import Call
    from resilient_llm.errors import RejectedError
    from resilient_llm.outcome import Outcome, Usage
    from resilient_llm.telemetry.names import Semconv

__all__ = ["Metrics"]


class Metrics:
    """Measure the calls of one pipeline.

    `models` and `tenants` are the names that become labels, all others being `other`. Without `models` the
    first hundred seen do; without `tenants` no metric has a tenant.
    """

    def __init__(
        self,
        instruments: Instruments,
        *,
        semconv: Semconv,
        models: Collection[str] | None,
        tenants: Collection[str] | None,
    ) -> None:
        self.instruments = instruments
        self._labels = instruments.labels
        self._gen_ai = instruments.gen_ai("released")
        self._inference = instruments.gen_ai(semconv)
        self.relabel(models=models, tenants=tenants)

    def relabel(self, *, models: Collection[str] | None, tenants: Collection[str] | None) -> None:
        """Go by other names from the next measurement on."""
        self._models = None if models is None else frozenset(models)
        self._tenants = None if tenants is None else frozenset(tenants)

    def tenants(self) -> Collection[str] | None:
        """Give the tenants that are labels."""
        return self._tenants

    @quiet
    def call_ended(
        self,
        call: Call,
        outcome: Outcome,
        *,
        seconds: float,
        first_chunk: float | None,
        gen_ai: bool,
        context: Context | None,
    ) -> None:
        """Measure a call; `gen_ai` is false where an instrumentation above measures it too.

        With a `context` the values point to its trace (as exemplars).
        """
        labels = self._of_call(call)
        if call.retries:
            self.instruments.retries.add(call.retries, labels)
            self.instruments.retry_delay.record(call.retry_delay, labels)
        if call.hedges:
            self.instruments.hedges.add(call.hedges, labels)
        if call.fallbacks:
            self.instruments.fallbacks.add(call.fallbacks, labels)
        if call.cost:
            self.instruments.cost.add(call.cost, labels)
        if not gen_ai:
            return
        instruments = self._inference if call.operation in names.INFERENCES else self._gen_ai
        if outcome.usage is not None:
            instruments.tokens(outcome.usage, labels)
        if first_chunk is not None:
            instruments.first_chunk.record(first_chunk, labels, context)
        word = call_outcome(call, outcome)
        labels = {**labels, names.OUTCOME: word}
        if word in CALL_ERRORS:
            labels[names.ERROR_TYPE] = self._labels.bound(names.ERROR_TYPE, error_type(outcome))
        instruments.duration.record(seconds, labels, context)

    @quiet
    def attempt_ended(
        self,
        attempt: Call,
        outcome: Outcome,
        *,
        status: int | None,
        seconds: float,
        context: Context | None,
    ) -> None:
        """Measure an attempt; `status` is that of its reply, if one came."""
        word = attempt_outcome(outcome)
        labels: Labelled = {
            names.ATTEMPT_TARGET: self._labels.bound(names.ATTEMPT_TARGET, attempt.target.name),
            names.ATTEMPT_PROVIDER: attempt.profile.provider,
            names.ATTEMPT_OUTCOME: word,
        }
        if attempt.model is not None:
            labels[names.ATTEMPT_MODEL] = self._model(attempt.model)
        if not (outcome.ok or attempt.committed or outcome.usage is None):
            self._discard(outcome.usage, labels)
        if status is not None:
            # Providers have different names for a 429, so that `error.type` cannot tell.
            known = self._labels.bound(names.STATUS_CODE, str(status)) != OTHER
            labels[names.STATUS_CODE] = status if known else OTHER
        if word in ATTEMPT_ERRORS:
            labels[names.ERROR_TYPE] = self._labels.bound(names.ERROR_TYPE, error_type(outcome))
        self.instruments.attempt_duration.record(seconds, labels, context)

    def _discard(self, usage: Usage, labels: Labelled) -> None:
        for kind, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            if tokens:
                self.instruments.discarded_tokens.add(tokens, {**labels, names.TOKEN_TYPE: kind})

    @quiet
    def waited(self, call: Call, limiter: str, outcome: str, *, seconds: float) -> None:
        """Measure a wait for a limiter."""
        labels: Labelled = {names.LIMITER_NAME: limiter, names.WAIT_OUTCOME: outcome}
        self.instruments.wait_duration.record(seconds, self._with_tenant(call, labels))

    @quiet
    def rejected(self, call: Call, error: RejectedError, *, dry_run: bool) -> None:
        """Count a refusal on this side; one that a dry run only reports is marked as such."""
        labels: Labelled = {names.LIMITER_NAME: error.name or OTHER, names.REASON: error.reason}
        if dry_run:
            labels[names.DRY_RUN] = True
        self.instruments.rejections.add(1, self._with_tenant(call, labels))

    @quiet
    def request_refused(self, code: str) -> None:
        """Count a request that was no call yet; there are few codes, and none comes from outside."""
        self.instruments.request_refusals.add(1, {names.ERROR_TYPE: code})

    @quiet
    def transition(self, name: str, from_: str, to: str, reason: str) -> None:
        """Count a circuit's change of state."""
        self.instruments.transitions.add(
            1,
            {
                names.BREAKER_NAME: self._labels.bound(names.BREAKER_NAME, name),
                names.BREAKER_FROM: from_,
                names.BREAKER_TO: to,
                names.BREAKER_REASON: reason,
            },
        )

    def _of_call(self, call: Call) -> Labelled:
        profile = call.profile
        labels: Labelled = {names.OPERATION: profile.operation, names.PROVIDER: profile.provider}
        if profile.model is not None:
            labels[names.REQUEST_MODEL] = self._model(profile.model)
        return self._with_tenant(call, labels)

    def _with_tenant(self, call: Call, labels: Labelled) -> Labelled:
        if self._tenants is not None and call.tenant is not None:
            labels[names.TENANT] = call.tenant if call.tenant in self._tenants else OTHER
        return labels

    def _model(self, model: str) -> str:
        if self._models is None:
            return self._labels.bound(names.REQUEST_MODEL, model)
        return model if model in self._models else OTHER
