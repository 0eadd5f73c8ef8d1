"""Limits, queue and settlement under any sequence of events, beside a model that keeps nothing but a ledger."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilient_llm.core.quota import Quota, Reservation
from resilient_llm.core.rate_queue import RateQueue
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import Ticket, TicketState, WaitingRoom

TENANTS = "abc"
MODELS = "xy"
CAPACITY = {"tenant": 8.0, "model": 10.0, "account": 12.0}
RATE = {"tenant": 0.7, "model": 1.0, "account": 1.5}
Name = tuple[str, str]


class Ledger:
    """What was put into and taken out of one bucket, and when; a level is what adding that up comes to."""

    def __init__(self, capacity: float, rate: float) -> None:
        self.capacity = capacity
        self.rate = rate
        self.entries: list[
            tuple[float, float, float]
        ] = []  # when, how much, and how deep the debt may get by it

    def level(self, now: float) -> float:
        level, then = self.capacity, 0.0
        for at, amount, floor in [*self.entries, (now, 0.0, -math.inf)]:
            level = min(self.capacity, level + (at - then) * self.rate)
            level = min(self.capacity, max(level + amount, min(level, floor)))
            then = at
        return level

    def put(self, at: float, amount: float, floor: float = -math.inf) -> None:
        self.entries.append((at, amount, floor))

    def check_promise(self) -> None:
        """In any time no more flows out than the capacity and what the time refills."""
        flows = [(at, -amount) for at, amount, floor in self.entries if floor == -math.inf]
        totals = list(accumulate((amount for _, amount in flows), initial=0.0))
        for first, (begin, _) in enumerate(flows):
            for last in range(first, len(flows)):
                allowed = self.capacity + self.rate * (flows[last][0] - begin)
                assert totals[last + 1] - totals[first] <= allowed + 1e-4


class Caller:
    """One call, from the moment it comes until it is over."""

    def __init__(self, number: int, tenant: str, model: str, tokens: float, reservation: Reservation) -> None:
        self.number = number
        self.tenant = tenant
        self.model = model
        self.tokens = tokens
        self.reservation = reservation
        self.ticket: Ticket[str] | None = None

    @property
    def names(self) -> list[Name]:
        return [("tenant", self.tenant), ("model", self.model), ("account", "")]


class LimitMachine(RuleBasedStateMachine):
    """Tenants, models and an account, each with one bucket; whoever waits looks again exactly when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.quotas = {
            (scope, key): Quota([TokenBucket(CAPACITY[scope], RATE[scope], 0.0)])
            for scope, keys in (("tenant", TENANTS), ("model", MODELS), ("account", [""]))
            for key in keys
        }
        self.ledgers = {name: Ledger(CAPACITY[name[0]], RATE[name[0]]) for name in self.quotas}
        self.queue = RateQueue[str](lambda: WaitingRoom(20), 20)
        self.waiting: list[Caller] = []
        self.running: list[Caller] = []
        self.callers = 0

    def conclude(self, over: list[Ticket[str]]) -> None:
        by_ticket = {caller.ticket: caller for caller in self.waiting}
        for ticket in over:
            caller = by_ticket[ticket]
            if ticket.state is TicketState.GRANTED:
                # First come, first served: nobody of the same tenant and model came before and still waits.
                ahead = [c for c in self.waiting if (c.tenant, c.model) == (caller.tenant, caller.model)]
                assert ahead[0] is caller
                self.grant(caller)
            else:
                assert ticket.state is TicketState.EXPIRED
            self.waiting.remove(caller)

    def grant(self, caller: Caller) -> None:
        for name in caller.names:
            assert self.ledgers[name].level(self.now) >= caller.tokens - 1e-5
            self.ledgers[name].put(self.now, -caller.tokens)
        self.running.append(caller)

    @rule(
        tenant=st.sampled_from(TENANTS),
        model=st.sampled_from(MODELS),
        tokens=st.sampled_from([0.5, 1.0, 3.0, 8.0]),
        patience=st.sampled_from([math.inf, math.inf, 5.0, 0.0]),
    )
    def come(self, tenant: str, model: str, tokens: float, patience: float) -> None:
        self.callers += 1
        names: list[Name] = [("tenant", tenant), ("model", model), ("account", "")]
        charges = [(self.quotas[name].buckets[0], tokens) for name in names]
        reservation = Reservation(charges, own=1, quotas=[self.quotas[name] for name in names])
        caller = Caller(self.callers, tenant, model, tokens, reservation)
        enough = all(self.ledgers[name].level(self.now) >= tokens + 1e-5 for name in names)
        if not self.waiting and reservation.take_at_once(self.now):
            self.grant(caller)
            return
        assert self.waiting or not enough
        delay = self.queue.delay(model, tenant, reservation, self.now, 0)
        if not self.waiting:
            exact = max(
                (tokens - self.ledgers[name].level(self.now)) / self.ledgers[name].rate for name in names
            )
            assert delay.seconds == pytest.approx(exact, abs=1e-4)
        if delay.seconds > patience:
            return
        caller.ticket = self.queue.push(
            model, tenant, reservation, self.now, cost=tokens, deadline=self.now + patience + 1e-6
        )
        assert (caller.ticket is None) == (len(self.waiting) == 20)
        if caller.ticket is not None:
            self.waiting.append(caller)
            self.conclude(self.queue.advance(self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.queue.next_at <= until:
            assert self.queue.next_at >= self.now
            self.now = self.queue.next_at
            self.conclude(self.queue.advance(self.now))
        self.now = until

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(self.waiting))
        assert caller.ticket is not None
        assert self.queue.cancel(caller.ticket)
        self.waiting.remove(caller)
        self.conclude(self.queue.give_back(caller.tenant, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), used=st.sampled_from([None, 0.0, 0.5, 1.0, 2.0, 9.0]))
    def be_done(self, data: st.DataObject, used: float | None) -> None:
        """`used` is what it came to, as a multiple of the estimate; None when it was never sent."""
        caller = data.draw(st.sampled_from(self.running))
        self.running.remove(caller)
        if used is None:
            caller.reservation.cancel(self.now)
            extra = -caller.tokens
        else:
            caller.reservation.settle([caller.tokens * used] * 3, self.now)
            extra = caller.tokens * (used - 1)
        for name in caller.names:
            ledger = self.ledgers[name]
            ledger.put(self.now, -extra, -ledger.capacity if extra > 0 else -math.inf)
        self.conclude(self.queue.give_back(caller.tenant, self.now))

    @invariant()
    def levels_are_those_of_the_ledger(self) -> None:
        for name, quota in self.quotas.items():
            assert quota.buckets[0].level(self.now) == pytest.approx(
                self.ledgers[name].level(self.now), abs=1e-4
            )
            assert quota.outstanding == sum(name in caller.names for caller in self.running)

    @invariant()
    def the_queue_holds_whom_the_model_holds(self) -> None:
        assert len(self.queue) == len(self.waiting)
        if not self.waiting:
            assert not self.queue._lanes
            assert self.queue.next_at == math.inf

    @invariant()
    def nobody_waits_alone_for_what_is_there(self) -> None:
        # With several waiting a dry bucket may be kept for one before; whoever is alone goes when it can.
        if len(self.waiting) == 1:
            (caller,) = self.waiting
            missing = max(
                (caller.tokens - self.ledgers[name].level(self.now)) / self.ledgers[name].rate
                for name in caller.names
            )
            assert missing > 0
            assert self.queue.next_at == pytest.approx(self.now + missing, abs=1e-3) or (
                self.queue.next_at < self.now + missing  # its levels fell since: it looks in vain once
            )

    @invariant()
    def somebody_is_always_looked_after(self) -> None:
        assert not self.waiting or self.now <= self.queue.next_at < math.inf

    def teardown(self) -> None:
        for caller in self.running:
            caller.reservation.keep()
        self.running.clear()
        patient = [caller for caller in self.waiting if caller.ticket and caller.ticket.deadline == math.inf]
        self.time_passes(1_000.0)
        assert not self.waiting, "somebody was forgotten"
        assert all(caller in self.running for caller in patient)
        for ledger in self.ledgers.values():
            ledger.check_promise()


TestLimits = LimitMachine.TestCase
TestLimits.settings = settings(max_examples=120, stateful_step_count=40)
