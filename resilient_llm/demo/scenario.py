"""Who calls, how often, and what the provider does wrong: the script of the demo.

Only what is to happen. What it leads to is measured elsewhere, and nothing here knows a policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from resilient_llm.testing import OK, FakeModel, FakeProvider, Fault, Latency, ProviderRequest, random_faults

MODEL: Final = "demo-mini"
FAILING_MODEL: Final = "demo-large"
NOISE: Final = 50
"""How many times the calls of a quiet tenant the noisy one makes."""

_QUIET_RATE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant: `rate` calls a second, whether or not earlier ones have been answered, of one model."""

    name: str
    rate: float = _QUIET_RATE
    model: str = MODEL

    def arrivals(self, duration: float, seed: int) -> Iterator[float]:
        """Give the seconds after the start at which it calls: one moment at random in each equal slice."""
        rng = Random(f"{seed} {self.name}")
        for n in range(math.ceil(self.rate * duration)):
            yield (n + rng.random()) / self.rate


QUIET: Final = (Tenant(name="amber"), Tenant(name="birch"), Tenant(name="cedar"))
UNLUCKY: Final = Tenant(name="unlucky", rate=5 * _QUIET_RATE, model=FAILING_MODEL)
NOISY: Final = Tenant(name="noisy", rate=NOISE * _QUIET_RATE)
TENANTS: Final = (*QUIET, UNLUCKY, NOISY)

_RANDOM_FAULTS: Mapping[str, tuple[float, Fault]] = {
    "429": (0.04, Fault(status=429, headers={"retry-after": "1"})),
    "503": (0.05, Fault(status=503)),
    "reset": (0.03, Fault(reset=True)),
    "slow": (0.03, Fault(delay_headers=0.8)),
}
_OUTAGE = Fault(status=503, message="The model is down")


class Faults:
    """What the provider does wrong: some of everything on one model, and a while of nothing on the other."""

    def __init__(self, duration: float, seed: int) -> None:
        self.outage = min(4.0, 0.4 * duration)
        """For how long `FAILING_MODEL` is down, in seconds."""
        self.injected: Counter[str] = Counter()
        """How many requests met each fault: 429, 503, reset, slow, outage."""
        self._random = random_faults(_RANDOM_FAULTS.values(), rng=Random(f"{seed} faults"))
        self._names = {fault: name for name, (_, fault) in _RANDOM_FAULTS.items()}
        self._down_after = 0.25 * duration
        self._down_from = math.inf

    def start(self, now: float) -> None:
        """Begin the demo's time, on anyio's clock; the model goes down after a quarter of it."""
        self._down_from = now + self._down_after

    @property
    def failures(self) -> int:
        """How many requests were answered with anything but a reply."""
        return self.injected.total() - self.injected["slow"]

    def at_random(self, request: ProviderRequest) -> Fault:
        """Choose a fault by chance, most often none."""
        fault = self._random(request)
        if fault is not OK:
            self.injected[self._names[fault]] += 1
        return fault

    def while_down(self, request: ProviderRequest) -> Fault:
        """Fail while the model is down."""
        if not self._down_from <= request.arrived < self._down_from + self.outage:
            return OK
        self.injected["outage"] += 1
        return _OUTAGE


def create_provider(faults: Faults, seed: int) -> FakeProvider:
    """Make the provider: two models, which get slower when more than 16 requests are in flight."""
    model = FakeModel(
        reply="Whatever you say, said the model, and said it well.",
        latency=Latency(headers=0.12, per_token=0.004, spread=0.3),
        knee=16,
    )
    provider = FakeProvider(
        None,
        models={MODEL: model, FAILING_MODEL: model},
        rng=Random(f"{seed} latency"),
        max_requests_kept=0,
    )
    provider.script(MODEL, faults.at_random)
    provider.script(FAILING_MODEL, faults.while_down)
    return provider
