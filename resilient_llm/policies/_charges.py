"""What a call is going to cost, and what it has cost, in US dollars and tokens.

Who may spend it, and where that is kept, must not enter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from resilient_llm.core.budget import Amount
from resilient_llm.outcome import Usage
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.policies._settlement import never_sent, tokens_used
from resilient_llm.policies.tokens import Estimate, estimate_once, has_output, prompt_tokens
from resilient_llm.pricing import Price, cost_of, price_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient_llm.call import Call
    from resilient_llm.outcome import Outcome

__all__ = ["Charge", "Dear", "PriceOf", "charge", "estimate_usd", "find_price"]

PriceOf: TypeAlias = Price | Callable[["Call"], Price | None]
"""What a call costs: a price, or a function that gives it, or `None` where it knows none."""

_NOTHING = Amount()


@runtime_checkable
class Dear(Protocol):
    """Know what a model costs at the dearest of the targets that it may go to; a `Router` does."""

    def dearest(self, model: str | None) -> Price | None:
        """Give the price; of all targets there are for a model that it does not know; `None` when it has none."""
        ...


class Charge(NamedTuple):
    """Say what a call has cost; `estimated` where some of it is not known."""

    amount: Amount
    estimated: bool = False


def find_price(call: Call, price: PriceOf | None, routers: Sequence[Dear]) -> Price | None:
    """Give the price of a call: the given one, else the dearest its router may come to, else its provider's list."""
    if isinstance(price, Price):
        return price
    if price is not None:
        try:
            found = price(call)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
            hook_failed("price", price, error)
        else:
            if found is None or isinstance(found, Price):
                return found
            hook_gave("price", price, found, "a Price, and None")
        return None
    if call.parent is None:
        model = call.logical_model or call.profile.model
        known = [found for router in routers if (found := router.dearest(model)) is not None]
        if known:
            return max(known, key=lambda found: found.blended)
    own = getattr(call.target, "price", None)
    return own if isinstance(own, Price) else price_of(call.profile.provider, call.model)


def estimate_usd(call: Call, price: Price, estimate: Estimate) -> float:
    """Give what a call will cost by the estimate of its tokens; those not known to be the prompt's as output."""
    tokens = estimate_once(call, estimate)
    prompt = min(tokens, prompt_tokens(call, estimate)) if has_output(call) else tokens
    usage = Usage(input_tokens=math.ceil(prompt), output_tokens=math.ceil(tokens - prompt))
    return cost_of(price, usage) or 0.0


def charge(
    call: Call, outcome: Outcome, reserved: Amount, *, price: Price | None, estimate: Estimate
) -> Charge | None:
    """Say what a finished call has cost; `None` when nothing of it was ever sent.

    What nobody knows is not zero: what was reserved for it stands.
    """
    if not outcome.ok and not call.cost and never_sent(call, outcome):
        return None
    tokens = tokens_used(call, outcome, estimate)
    try:
        usd, known = _usd(call, outcome, reserved, price, tokens)
    except (ArithmeticError, TypeError, ValueError):  # anybody's `classify_result` may say anything of usage
        usd, known = max(reserved.usd, call.cost), False
    return Charge(Amount(usd, reserved.tokens if tokens is None else tokens), tokens is None or not known)


def _usd(
    call: Call, outcome: Outcome, reserved: Amount, price: Price | None, tokens: float | None
) -> tuple[float, bool]:
    """Give what a call has cost in US dollars, and whether that is known."""
    routed = call.cost if call.route is not None else 0.0  # its attempts', each at its target's price
    if tokens == 0:
        return routed, True
    usage = outcome.usage
    counted = usage is not None and not usage.estimated and tokens is not None
    if counted and routed > 0:
        return routed, True
    if usage is not None and usage.output_tokens is None and not has_output(call):
        usage = replace(usage, output_tokens=0)
    by_usage = None if usage is None or price is None else cost_of(price, usage)
    if counted and by_usage is not None:
        return by_usage, True
    if price is None:
        return routed, False
    return max(reserved.usd, routed, by_usage or 0.0), False
