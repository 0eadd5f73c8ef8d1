"""One file per balancer: pure orders of equivalent targets, from what is known of them.

A balancer sees loads, weights, prices and what a call needs. It knows no request, no circuit and no clock.
"""

from resilient_llm.routing.balancers.balancer import Balancer, Need
from resilient_llm.routing.balancers.cheapest import Cheapest
from resilient_llm.routing.balancers.least_outstanding_tokens import LeastOutstandingTokens
from resilient_llm.routing.balancers.peak_ewma import PeakEWMA
from resilient_llm.routing.balancers.prefix_affinity import PrefixAffinity
from resilient_llm.routing.balancers.priority import Priority
from resilient_llm.routing.balancers.weighted_least_connections import WeightedLeastConnections
from resilient_llm.routing.balancers.weighted_random import WeightedRandom

__all__ = [
    "Balancer",
    "Cheapest",
    "LeastOutstandingTokens",
    "Need",
    "PeakEWMA",
    "PrefixAffinity",
    "Priority",
    "WeightedLeastConnections",
    "WeightedRandom",
]
