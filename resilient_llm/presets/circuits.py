"""Circuits with settings that have proven themselves in services of a kind.

They are experience, not facts about a provider: none says when it should be left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from resilient_llm.policies import CircuitBreaker
from resilient_llm.presets.preset import copy, named

__all__ = ["CIRCUITS", "circuit_breaker"]


def _agent(failures: int, seconds: float) -> CircuitBreaker:
    return CircuitBreaker(
        failure_ratio=None,
        consecutive_failures=failures,
        break_duration=seconds,
        max_break_duration=seconds,
        success_threshold=3,
        key="model",
    )


CIRCUITS: Mapping[str, CircuitBreaker] = MappingProxyType(
    {
        # An agent's models, each with a circuit of its own: so many failures in a row, so long a break.
        "agent-quick": _agent(3, 30),
        "agent-brisk": _agent(4, 45),
        "agent-steady": _agent(5, 60),
        "agent-patient": _agent(7, 90),
        # Batches of millions of items: a share of many, for a single failure in a row of five means nothing there.
        "batch": CircuitBreaker(
            failure_ratio=0.2,
            minimum_throughput=50,
            sampling_calls=200,
            consecutive_failures=None,
            break_duration=30,
            key="model",
        ),
        # Several deployments behind one gateway: there is another to go to, so it is left early.
        "gateway": CircuitBreaker(
            failure_ratio=None, consecutive_failures=5, break_duration=30, half_open_max_calls=3, key="target"
        ),
        # A service with steady traffic.
        "service": CircuitBreaker(
            failure_ratio=0.3, consecutive_failures=5, break_duration=30, half_open_max_calls=2, key="target"
        ),
    }
)
"""Patterns by name, for `circuit_breaker`."""


def circuit_breaker(circuit: str, /, **overrides: object) -> CircuitBreaker:
    """Make the `CircuitBreaker` that has this name in `CIRCUITS`, with any of its options overridden.

    Raises `ConfigurationError` for an unknown name, with those there are.
    """
    return copy(named(CIRCUITS, "circuit", circuit), overrides)
