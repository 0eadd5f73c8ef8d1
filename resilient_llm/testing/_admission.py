"""Whether the fake provider lets a request in: keys, models, concurrency and rate limits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

from ._dialect import Dialect
from ._fault import Fault
from ._model import FakeModel
from ._rate_limits import Level, Quota, RateLimits, tightest
from ._request_log import ProviderRequest


class Admission:
    """Count what is in flight and what has been used, and refuse what is too much."""

    def __init__(
        self,
        default: FakeModel | None,
        models: Mapping[str, FakeModel],
        *,
        account_limits: RateLimits | None,
        api_keys: Collection[str] | None,
    ) -> None:
        self._in_flight: defaultdict[str, set[ProviderRequest]] = defaultdict(set)
        self._default = default
        self._models = models
        self._account_limits = account_limits
        self._api_keys = api_keys
        self._quotas: dict[tuple[str | None, str | None], Quota] = {}

    def model(self, name: str) -> FakeModel:
        """Return the model of this name. Raises KeyError if `refuse_sender` has to refuse it."""
        return self._models[name] if self._default is None else self._models.get(name, self._default)

    def refuse_sender(self, request: ProviderRequest) -> Fault | None:
        """Return the answer to a request with a wrong key or an unknown model."""
        if self._api_keys is not None and request.api_key not in self._api_keys:
            return Fault(status=401)
        if self._default is None and request.model not in self._models:
            return Fault(status=404, message=f"The model `{request.model}` does not exist.")
        return None

    def refuse_load(
        self, request: ProviderRequest, dialect: Dialect, reply_tokens: int, now: float
    ) -> Fault | None:
        """Return the answer to a request that is too much; charge it to the rate limits if it is not."""
        tokens = request.prompt_tokens + reply_tokens
        model = self.model(request.model)
        if len(self._in_flight[request.model]) >= (model.max_concurrent or math.inf):
            request.refused = "concurrency"
            return model.overload
        quotas = self._quotas_of(request)
        refusals = [refusal for quota in quotas if (refusal := quota.refusal(tokens, now)) is not None]
        if refusals:
            worst = max(refusals, key=lambda refusal: refusal.wait)
            request.refused = worst.level.dimension
            return dialect.refusal(request.model, worst)
        for quota in quotas:
            quota.charge(tokens)
        return None

    def enter(self, request: ProviderRequest) -> None:
        """Count a request as in flight."""
        self._in_flight[request.model].add(request)

    def leave(self, request: ProviderRequest) -> None:
        """Count a request no more, if it was."""
        self._in_flight[request.model].discard(request)

    def slowdown(self, model: str) -> float:
        """Return by how much a model's load stretches its times at the moment."""
        knee = self.model(model).knee
        return max(1.0, len(self._in_flight[model]) / knee) if knee else 1.0

    def levels(self, request: ProviderRequest, now: float) -> list[Level]:
        """Return where the rate limits stand that apply to the request."""
        return tightest([level for quota in self._quotas_of(request) for level in quota.levels(now)])

    def _quotas_of(self, request: ProviderRequest) -> list[Quota]:
        model = self._models.get(request.model, self._default)
        limits = ((request.model, model.rate_limits if model else None), (None, self._account_limits))
        return [self._quota(name, request, limit) for name, limit in limits if limit is not None]

    def _quota(self, model: str | None, request: ProviderRequest, limits: RateLimits) -> Quota:
        key = (model, request.api_key if limits.per_key else None)
        if key not in self._quotas:
            self._quotas[key] = Quota(limits)
        return self._quotas[key]
