"""Your policies against synthetic upstreams, in virtual time: an hour of traffic in seconds.

Upstreams are described (latency, capacity, limits, failures, outages, prices), traffic is described (when calls come
and what they ask for), and `simulate` carries the one through your policies to the other. What runs is the library
itself; only the network and the clock are made up.
"""

from resilient_llm.lab.arrivals import Arrivals, Burst, ClosedLoop, OpenArrivals, Paced, Poisson, Steps
from resilient_llm.lab.capacity import Capacity, Sharing, Slots
from resilient_llm.lab.conditions import FailureKind, Outage, Phase, episodes
from resilient_llm.lab.distributions import (
    Amount,
    Bimodal,
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Uniform,
)
from resilient_llm.lab.exchange import Exchange
from resilient_llm.lab.network import URL, Network
from resilient_llm.lab.record import CallRecord
from resilient_llm.lab.report import Bucket, Report, UpstreamReport, table
from resilient_llm.lab.simulation import Gauges, drive, simulate
from resilient_llm.lab.summary import Summary
from resilient_llm.lab.traffic import Chat, MakeRequest, Traffic
from resilient_llm.lab.upstream import Key, Upstream

__all__ = [
    "URL",
    "Amount",
    "Arrivals",
    "Bimodal",
    "Bucket",
    "Burst",
    "CallRecord",
    "Capacity",
    "Chat",
    "ClosedLoop",
    "Constant",
    "Distribution",
    "Empirical",
    "Exchange",
    "Exponential",
    "FailureKind",
    "Gauges",
    "Key",
    "LogNormal",
    "MakeRequest",
    "Network",
    "OpenArrivals",
    "Outage",
    "Paced",
    "Phase",
    "Poisson",
    "Report",
    "Sharing",
    "Slots",
    "Steps",
    "Summary",
    "Traffic",
    "Uniform",
    "Upstream",
    "UpstreamReport",
    "drive",
    "episodes",
    "simulate",
    "table",
]
