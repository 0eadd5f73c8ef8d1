"""Caps on what tenants spend, in US dollars and in tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import anyio

from resilient_llm._options import (
    at_least,
    flag,
    function,
    is_number,
    label,
    number,
    offers,
    one_of,
    synchronous,
    takes,
)
from resilient_llm.core.budget import Amount, BudgetLevel, Cap, Decision, Reservation, Unit
from resilient_llm.core.period import Period, RollingPeriod
from resilient_llm.errors import BudgetExceededError, ConfigurationError, StoreUnavailableError
from resilient_llm.ordering import Door, Placement
from resilient_llm.policies._calendar import CalendarPeriod, WorldClock
from resilient_llm.policies._charges import Dear, PriceOf, charge, estimate_usd, find_price
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.policies._keyed import Key, key_function
from resilient_llm.policies._store_events import tell_store
from resilient_llm.policies.ledger import BudgetLedger, MemoryLedger
from resilient_llm.policies.tokens import Estimate, TokenEstimate, estimate_once
from resilient_llm.pricing import Price
from resilient_llm.telemetry.names import BUDGET_SPENT_RATIO, LIMIT_UNIT, LIMITER_NAME

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Reply
    from resilient_llm.outcome import Outcome
    from resilient_llm.stores.guard import StoreGuard
    from resilient_llm.telemetry import Telemetry

__all__ = ["Allowance", "Budget"]

logger = logging.getLogger("resilient_llm")

Allowance: TypeAlias = float | Mapping[Any, float | None] | Callable[[Any], float | None]
"""How much a key may spend: the same for each, by key (with `"*"` for all others), or a function of the key."""

_OTHERS = "*"
_MAX_KINDS = 1_000  # of caps that are remembered
_DAY = 86_400.0
_CAPS: tuple[tuple[str, Unit, Literal["day", "month"]], ...] = (
    ("usd_per_day", "usd", "day"),
    ("usd_per_month", "usd", "month"),
    ("tokens_per_day", "tokens", "day"),
    ("tokens_per_month", "tokens", "month"),
)
_ROLLING = {"day": RollingPeriod("day", _DAY, 24), "month": RollingPeriod("month", 30 * _DAY, 30)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """Let each key spend at most so many US dollars and tokens in a day, and in a month.

    A call reserves what it is estimated to cost; when it is over, what it has cost takes the place of that. Caps are
    numbers, mappings with an entry `"*"` for all other keys, or functions of the key; `None` is no cap. A day is any
    24 hours, a month any 30 days, and what is spent comes back up to an hour, or a day, after that; with `calendar`,
    a function that gives the world's time as a `datetime` with a time zone, they are those of the calendar there.

    Prices are `price`, a `Price` or a function of the call, else the dearest that the `Router` further in may come
    to, else those that the provider publishes (extra `prices`). With a cap in US dollars a call without any price is
    refused, or with `unpriced="allow"` let through and counted in tokens only. What a finished call has cost is what
    its router has added up, else its usage at that price; where that is not known the estimate stands.

    Once `warn_ratio` of a cap is spent, the next call's span gets an event, and the log a line. With `dry_run`
    everything is counted and reported, and nothing refused. What is spent is kept by `ledger`, by default in this
    process for at most `max_keys` keys; a store's `ledger` keeps it by `name`, for all processes. Raises
    `BudgetExceededError`, and `StoreUnavailableError` where a store that does not answer is to refuse calls.
    """

    usd_per_day: Allowance | None = None
    usd_per_month: Allowance | None = None
    tokens_per_day: Allowance | None = None
    tokens_per_month: Allowance | None = None
    key: Key = "tenant"
    price: PriceOf | None = None
    unpriced: Literal["refuse", "allow"] = "refuse"
    estimate: Estimate = field(default_factory=TokenEstimate)
    calendar: WorldClock | None = None
    warn_ratio: float | None = 0.8
    ledger: BudgetLedger | None = None
    max_keys: int = 10_000
    dry_run: bool = False
    name: str = "budget"
    placement: ClassVar[Placement] = Placement.ADMISSION
    attempt_placement: ClassVar[Placement] = Placement.ATTEMPT_RATE
    _allowances: Sequence[tuple[Unit, Period, Callable[[Hashable], float]]] = field(init=False, repr=False)
    _key: Callable[[Call], Hashable] = field(init=False, repr=False)
    _ledger: BudgetLedger = field(init=False, repr=False)
    _guard: StoreGuard | None = field(init=False, repr=False)
    _in_usd: bool = field(init=False, repr=False)
    _caps_of: dict[tuple[float, ...], Sequence[Cap]] = field(init=False, repr=False, default_factory=dict)
    _routers: list[Dear] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        at_least(1, max_keys=self.max_keys)
        flag(dry_run=self.dry_run)
        label(name=self.name)
        number(0, 1, none=True, warn_ratio=self.warn_ratio)
        one_of(("refuse", "allow"), unpriced=self.unpriced)
        function(estimate=self.estimate)
        synchronous(price=self.price, calendar=self.calendar)
        takes(1, price=self.price)
        if not isinstance(self.price, Price | None) and (
            not callable(self.price) or isinstance(self.price, type)
        ):
            raise ConfigurationError(
                f"price={self.price!r}: allowed are a Price, a function of the call, and None"
            )
        offers(("reserve", "settle", "refund", "levels"), "ledgers", none=True, ledger=self.ledger)
        self._check_calendar()
        allowances = []
        for option, unit, name in _CAPS:
            given: Allowance | None = getattr(self, option)
            if given is not None:
                period = _ROLLING[name] if self.calendar is None else CalendarPeriod(name, self.calendar)
                allowances.append((unit, period, _allowance(option, given)))
        if not allowances:
            raise ConfigurationError(
                f"Budget without a cap: give one of {', '.join(cap[0] for cap in _CAPS)}"
            )
        ledger = MemoryLedger(max_keys=self.max_keys) if self.ledger is None else self.ledger
        object.__setattr__(self, "_allowances", allowances)
        in_store = not isinstance(ledger, MemoryLedger)
        object.__setattr__(self, "_key", key_function(self.key, in_store=in_store))
        object.__setattr__(self, "_ledger", ledger)
        object.__setattr__(self, "_guard", getattr(ledger, "guard", None))
        object.__setattr__(self, "_in_usd", any(unit == "usd" for unit, *_ in allowances))

    def _check_calendar(self) -> None:
        if self.calendar is None:
            return
        try:
            now = self.calendar() if callable(self.calendar) else None
        except Exception as error:
            msg = f"calendar={self.calendar!r}: failed with {type(error).__name__}"
            raise ConfigurationError(msg) from error
        if not isinstance(now, datetime) or now.tzinfo is None:
            raise ConfigurationError(
                f"calendar={self.calendar!r}: allowed are functions that give a datetime with a time zone, and None"
            )

    def check(self, policies: Sequence[object]) -> None:
        """Look for who knows what the calls will cost."""
        for policy in policies:
            if isinstance(policy, Dear) and not any(policy is known for known in self._routers):
                self._routers.append(policy)

    def check_door(self, door: Door) -> None:
        """Refuse to stand where nobody knows what a call costs."""
        if door == "asgi":
            raise ConfigurationError(
                f"{self.name}: a request at the ASGI door has no price; put it on the transport"
            )
        if door == "callable" and isinstance(self.estimate, TokenEstimate):
            raise ConfigurationError(
                f"{self.name}: a function has no prompt to estimate tokens from: give estimate="
            )

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Reserve what the call may cost, and await the rest of the pipeline."""
        key = self._key(call)
        tokens = estimate_once(call, self.estimate)
        price = find_price(call, self.price, self._routers) if self._in_usd else None
        if price is None and self._in_usd and tokens:
            self._unpriced(call)
        amount = Amount(0.0 if price is None else estimate_usd(call, price, self.estimate), tokens)
        try:
            decision = await self._ledger.reserve(
                (self.name, key), amount, self._caps(key), call.loop.time(), enforce=not self.dry_run
            )
        except StoreUnavailableError as error:
            call.telemetry.rejected(call, error)
            raise
        finally:
            if self._guard is not None:
                tell_store(call, self._guard)
        if decision.reservation is not None:
            call.on_finish(partial(self._finish, call, decision.reservation, price))
        self._report(call, key, decision)
        if decision.refused is not None:
            self._refuse(call, self._exceeded(decision, decision.refused, amount))
        return await call_next(call)

    def _caps(self, key: Hashable) -> Sequence[Cap]:
        """Give the caps of a key: the same object for all who may spend the same, since ledgers keep them."""
        limits = tuple(allowed(key) for _, _, allowed in self._allowances)
        caps = self._caps_of.get(limits)
        if caps is None:
            if len(self._caps_of) >= _MAX_KINDS:
                self._caps_of.clear()
            warn_ratio = math.inf if self.warn_ratio is None else self.warn_ratio
            caps = self._caps_of[limits] = tuple(
                Cap(unit, period, limit, warn_ratio)
                for (unit, period, _), limit in zip(self._allowances, limits, strict=True)
            )
        return caps

    def _refuse(self, call: Call, error: BudgetExceededError) -> None:
        call.telemetry.rejected(call, error, dry_run=self.dry_run)
        if not self.dry_run:
            raise error

    def _unpriced(self, call: Call) -> None:
        profile = call.profile
        if self.unpriced == "allow":
            call.telemetry.event(call, "budget.unpriced", {LIMITER_NAME: self.name})
            return
        self._refuse(
            call,
            BudgetExceededError(
                f"{self.name}: no price is known for model {call.logical_model or call.model!r} of "
                f"{profile.provider}, so that nobody knows what the call would spend; give price=",
                name=self.name,
            ),
        )

    def _exceeded(self, decision: Decision, level: BudgetLevel, amount: Amount) -> BudgetExceededError:
        unit: Unit = "usd" if level.name.startswith("usd") else "tokens"
        back = decision.retry_after
        room = "it never has room for" if back is None else f"in {math.ceil(back)} s it has room for"
        error = BudgetExceededError(
            f"{self.name}: {level.name} is {_said(level.limit, unit)}, of which {_said(level.spent, unit)} is spent "
            f"and {_said(level.reserved, unit)} reserved; {room} this call, of {_said(amount.of(unit), unit)}",
            retry_after=back,
            name=self.name,
        )
        error.level = level
        return error

    def _report(self, call: Call, key: Hashable, decision: Decision) -> None:
        if decision.overflow:
            call.telemetry.event(call, "keys_overflow", {LIMITER_NAME: self.name})
        for level in decision.crossed:
            share = level.spent / level.limit if level.limit else 1.0
            logger.warning(
                "budget=%r key=%r cap=%s spent=%g limit=%g",
                self.name,
                key,
                level.name,
                level.spent,
                level.limit,
            )
            call.telemetry.event(
                call,
                "budget.warning",
                {LIMITER_NAME: self.name, LIMIT_UNIT: level.name, BUDGET_SPENT_RATIO: share},
            )

    def _finish(
        self, call: Call, reservation: Reservation, price: Price | None, outcome: Outcome
    ) -> Awaitable[None] | None:
        now = call.loop.time()
        spent = charge(call, outcome, reservation.amount, price=price, estimate=self.estimate)
        if spent is None:
            return self._ledger.refund(reservation, now)
        if spent.estimated:
            call.telemetry.event(call, "budget.estimated", {LIMITER_NAME: self.name})
        return self._ledger.settle(reservation, spent.amount, now, estimated=spent.estimated)

    async def spent(self, key: Hashable) -> tuple[BudgetLevel, ...]:
        """Say how the caps of a key stand."""
        return await self._ledger.levels((self.name, key), self._caps(key), anyio.current_time())

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauge `limit.remaining`: by cap, of the key that has least."""
        if self._guard is not None:
            self._guard.observe(telemetry)
        telemetry.observe(
            "limit.remaining", self._observe, "1", "What remains of a limit, for who has least", merge=min
        )

    def _observe(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        if isinstance(self._ledger, MemoryLedger):
            for cap, remaining in self._ledger.lowest().items():
                unit, _, period = cap.partition("_per_")
                yield remaining, {LIMITER_NAME: f"{self.name}:{period}", LIMIT_UNIT: unit}


def _said(amount: float, unit: Unit) -> str:
    return f"${amount:.4g}" if unit == "usd" else f"{amount:.0f} tokens"


def _allowance(option: str, given: Allowance) -> Callable[[Hashable], float]:
    """Make the function that says how much a key may spend; infinity where there is no cap."""
    if isinstance(given, Mapping):
        for key, limit in given.items():
            _check(f"{option}: of {key!r}", limit)
        if _OTHERS not in given:
            raise ConfigurationError(
                f"{option}={given!r}: say what all other keys may spend, as '*' (None: no cap)"
            )
        by_key, others = given, given[_OTHERS]
        return lambda key: _or_no_cap(by_key.get(key, others))
    if callable(given):
        function(none=False, asynchronous=False, arguments=1, **{option: given})
        return partial(_asked, option, given)
    _check(option, given)
    return lambda _key: given


def _check(what: str, limit: float | None) -> None:
    if limit is not None and not (is_number(limit) and limit >= 0):
        raise ConfigurationError(f"{what}={limit!r}: allowed are numbers from 0, and None for no cap")


def _asked(option: str, function: Callable[[Hashable], float | None], key: Hashable) -> float:
    """Ask the application; where it fails there is no cap, as no call must break of it."""
    try:
        limit = function(key)
        if limit is None or (is_number(limit) and limit >= 0):
            return _or_no_cap(limit)
        hook_gave(option, function, limit, "numbers from 0, and None")
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not break the call
        hook_failed(option, function, error)
    return math.inf


def _or_no_cap(limit: float | None) -> float:
    return math.inf if limit is None else limit
