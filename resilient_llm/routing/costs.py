"""What an attempt has cost, also where its reply does not say how much it was.

What models cost is `pricing`'s to know. Who may spend how much must not enter here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient_llm.outcome import Outcome, Usage, Verdict
from resilient_llm.policies.tokens import prompt_tokens
from resilient_llm.pricing import cost_of

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.policies.tokens import Estimate
    from resilient_llm.pricing import Price

__all__ = ["attempt_cost"]


def attempt_cost(call: Call, price: Price | None, outcome: Outcome, estimate: Estimate) -> float:
    """Give what an attempt that has ended so has cost, in US dollars; 0 where there is no price.

    Tokens that were not reported are estimated: those of the prompt, which was read if there was an answer or may
    have been, and of the answer those that came. What was refused cost nothing.
    """
    if price is None or not call.sent:
        return 0.0
    usage = outcome.usage
    if usage is None:
        broke_off = outcome.ambiguous and outcome.status is None
        if not (outcome.ok or broke_off or outcome.verdict is Verdict.NEUTRAL):
            return 0.0
        usage = Usage()
    if usage.input_tokens is None or usage.output_tokens is None:
        prompt, written = usage.input_tokens, usage.output_tokens
        usage = replace(
            usage,
            input_tokens=int(prompt_tokens(call, estimate)) if prompt is None else prompt,
            output_tokens=written or 0,
            estimated=True,
        )
    return cost_of(price, usage) or 0.0
