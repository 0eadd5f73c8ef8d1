"""Which target each attempt goes to, and which model each call.

A router knows targets, calls and outcomes; it knows no HTTP library. Scores and decisions are pure; what waits,
sends and records is a thin shell over them.
"""

from resilient_llm.core.canary import RolloutState
from resilient_llm.core.slo import SLO
from resilient_llm.routing.canary import Canary, CanaryChange, CanaryStatus
from resilient_llm.routing.classifier import Classifier, ModelClassifier
from resilient_llm.routing.complexity import Complexity, ComplexityWeights
from resilient_llm.routing.health import Health, Latency, TargetHealth
from resilient_llm.routing.intent import IntentClassifier
from resilient_llm.routing.keywords import Keywords
from resilient_llm.routing.router import Router
from resilient_llm.routing.tiers import Tier, TierRouter, estimate_cost

__all__ = [
    "SLO",
    "Canary",
    "CanaryChange",
    "CanaryStatus",
    "Classifier",
    "Complexity",
    "ComplexityWeights",
    "Health",
    "IntentClassifier",
    "Keywords",
    "Latency",
    "ModelClassifier",
    "RolloutState",
    "Router",
    "TargetHealth",
    "Tier",
    "TierRouter",
    "estimate_cost",
]
