"""Try a configuration against an upstream that fails, in virtual time: 25 minutes of traffic in a second.

Prints:
                calls success      mean       p50       p95       p99  requests/call   USD/1000
    nothing      1500  91.20%       765       777      1345      1741          1.000      0.899
    retry        1500  96.27%       941       816      1669      5068          1.111      0.904
    and circuit  1500  94.73%       908       812      1711      3603          1.041      0.903
"""

from resilient_llm import CircuitBreaker, Policy, Retry
from resilient_llm.lab import (
    Chat,
    LogNormal,
    Network,
    Outage,
    Poisson,
    Traffic,
    Uniform,
    Upstream,
    simulate,
    table,
)

upstream = Upstream(
    first_token=LogNormal(0.4, sigma=0.5),  # half of them under 0.4 s, one in a hundred over 1.3 s
    per_token=0.004,
    output_tokens=Uniform(20, 180),
    failures={"503": 0.02, "reset": 0.01},
    outages=[
        Outage(300, 330),
        Outage(700, 710, "connect"),
        Outage(1000, 1100, "429", share=0.5, retry_after=2),
    ],
    input_price=0.25,
    output_price=9.0,
)
traffic = Traffic(arrivals=Poisson(1.0), request=Chat(model="gpt-4o", prompt_tokens=LogNormal(60, 0.8)))

CONFIGURATIONS: dict[str, list[Policy]] = {
    "nothing": [],
    "retry": [Retry(max_attempts=4)],
    "and circuit": [Retry(max_attempts=4), CircuitBreaker()],
}


def main() -> None:
    reports = {
        name: simulate(policies, Network(upstream), traffic, calls=1500)
        for name, policies in CONFIGURATIONS.items()
    }
    print(table(reports))
    # The same calls came each time, so what differs is what the policies made of them.
    assert len({tuple(call.started for call in report.calls) for report in reports.values()}) == 1


if __name__ == "__main__":
    main()
