"""What one upstream has granted so far: its rate limits and spending limits, its own and those of its keys."""

from __future__ import annotations

import math
from collections import defaultdict
from email.utils import formatdate
from typing import TYPE_CHECKING

from resilient_llm.lab.conditions import FailureKind
from resilient_llm.lab.wording import EPOCH, Asked
from resilient_llm.testing._rate_limits import Quota, RateLimits, Refusal, tightest

if TYPE_CHECKING:
    from resilient_llm.lab.upstream import Upstream
    from resilient_llm.message import Headers

__all__ = ["Quotas"]


class Quotas:
    """Count what requests use, and refuse what is too much; `now` is in seconds since the simulation began."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._quotas: dict[tuple[str, str | None], Quota] = {}
        self._spent = 0.0
        self._spent_by: defaultdict[str | None, float] = defaultdict(float)

    def turned_away(self, key: str | None) -> FailureKind | None:
        """Say how a key is refused that is not accepted, or has spent what it may."""
        keys = self._upstream.keys
        if keys is not None and key not in keys:
            return "401"
        own = math.inf if keys is None or key is None else keys[key].max_usd
        if self._spent >= self._upstream.max_usd or self._spent_by[key] >= own:
            return "insufficient_quota"
        return None

    def spend(self, key: str | None, usd: float) -> None:
        """Count what a request has cost."""
        self._spent += usd
        self._spent_by[key] += usd

    def take(self, asked: Asked, tokens: int, now: float) -> Refusal | None:
        """Charge a request of so many tokens to every rate limit, or to none and say which one refuses it."""
        quotas = self._of(asked.key)
        refusals = [refusal for quota in quotas if (refusal := quota.refusal(tokens, now)) is not None]
        if refusals:
            return max(refusals, key=lambda refusal: refusal.wait)
        for quota in quotas:
            quota.charge(tokens)
        return None

    def headers(self, asked: Asked, now: float) -> Headers:
        """Give the headers that say where the rate limits stand."""
        quotas = self._of(asked.key)
        if not quotas:
            return []
        levels = tightest([level for quota in quotas for level in quota.levels(now)])
        told = asked.dialect.rate_limit_headers(levels, EPOCH + now)
        told["date"] = formatdate(EPOCH + now, usegmt=True)  # what instants in the others are compared with
        return [(name.encode(), value.encode()) for name, value in told.items()]

    def _of(self, key: str | None) -> list[Quota]:
        upstream = self._upstream
        limits: list[tuple[tuple[str, str | None], RateLimits | None]] = []
        if upstream.rate_limits is not None:
            shared = not upstream.rate_limits.per_key
            limits.append((("upstream", None if shared else key), upstream.rate_limits))
        if upstream.keys is not None and key is not None and key in upstream.keys:
            limits.append((("key", key), upstream.keys[key].rate_limits))
        return [self._quota(name, limit) for name, limit in limits if limit is not None]

    def _quota(self, name: tuple[str, str | None], limits: RateLimits) -> Quota:
        if name not in self._quotas:
            self._quotas[name] = Quota(limits)
        return self._quotas[name]
