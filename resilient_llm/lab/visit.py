"""One request in the house of an upstream: it makes room when it ends, and pays, however that comes about."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient_llm.lab.exchange import Exchange
    from resilient_llm.lab.generation import Generation
    from resilient_llm.lab.serving import Serving

__all__ = ["Visit"]


class Visit:
    """Follow one request from its arrival to its end, which comes once."""

    __slots__ = ("_serving", "exchange", "failure", "generation", "in_service")

    def __init__(self, serving: Serving, exchange: Exchange) -> None:
        self._serving = serving
        self.exchange = exchange
        self.failure: str | None = None
        self.generation: Generation | None = None
        self.in_service = False
        serving.in_flight += 1
        serving.in_flight_max = max(serving.in_flight_max, serving.in_flight)

    def end(self, failure: str | None) -> None:
        """Note how it ended, and leave."""
        exchange, serving = self.exchange, self._serving
        if exchange.ended is not None:
            return
        exchange.ended = serving.now()
        exchange.failure = failure
        if self.generation is not None:
            exchange.output_tokens = self.generation.made()
            exchange.usd = serving.upstream.price(exchange.input_tokens, exchange.output_tokens)
            serving.quotas.spend(exchange.key, exchange.usd)
        serving.in_flight -= 1
        if self.in_service:
            serving.leave_service()
