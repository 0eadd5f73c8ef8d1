"""What the tenants of a rate queue were served where lanes compete, and the round they are in.

Start-time fair queueing over all lanes, as arithmetic on accounts. Which lane goes first by it, and what there is of a
bucket, must not enter here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from resilient_llm.core.places import is_within_share, who_makes_way

__all__ = ["Account", "Accounts"]

Tenant = TypeVar("Tenant", bound=Hashable)

_MIN_REMEMBERED = 64


class Account:
    """Add up what one tenant was served where lanes compete, as cost over weight, and how many calls wait."""

    __slots__ = ("calls", "turn", "weight")

    def __init__(self, turn: float, weight: float) -> None:
        self.turn = turn
        self.weight = weight
        self.calls = 0


class Accounts(Generic[Tenant]):
    """Keep an account for each tenant that waits or owes something.

    `weight` says what a tenant's share is in proportion to; it is read when the tenant comes in. Source: start-time
    fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996).
    """

    __slots__ = ("_accounts", "_round", "_step", "_weight_of", "calls", "weight")

    def __init__(self, weight: Callable[[Tenant], float]) -> None:
        self._weight_of = weight
        self._accounts: dict[Tenant, Account] = {}
        self._round = 0.0
        self._step = 0.0  # what the round moves on by when the next call is served
        self.calls = 0
        """How many calls wait, of all tenants."""
        self.weight = 0.0
        """The weights of all tenants that wait, added up."""

    def get(self, tenant: Tenant) -> Account | None:
        """Give a tenant's account; `None` when it has none."""
        return self._accounts.get(tenant)

    def waiting(self, tenant: Tenant) -> int:
        """Say how many calls of a tenant wait."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.calls

    def who_makes_way(self, tenant: Tenant, places: int) -> Tenant | None:
        """Choose which tenant makes way for one more call of this one, of so many places that are all taken.

        `None` where nobody does, as `places` says.
        """
        account = self._accounts.get(tenant)
        calls = 1 if account is None else 1 + account.calls
        weight = self._weight_of(tenant) if account is None else account.weight
        weights = max(
            self.weight + (weight if calls == 1 else 0.0), weight
        )  # sums of floats come out a little less
        if not is_within_share(calls, weight, weights, places):
            return None
        waiting = ((each, its.calls, its.weight) for each, its in self._accounts.items())
        return who_makes_way(waiting, weights, places)

    def join(self, tenant: Tenant) -> Account:
        """Give the account of a tenant that has a call to wait; kept once that is counted."""
        account = self._accounts.get(tenant)
        if account is None:
            return Account(self._round, self._weight_of(tenant))
        if not account.calls:
            account.turn = max(account.turn, self._round)
        return account

    def count_in(self, tenant: Tenant, account: Account) -> None:
        """Count one call more that waits."""
        if not account.calls:
            self._accounts[tenant] = account
            self.weight += account.weight
        account.calls += 1
        self.calls += 1

    def count_out(self, account: Account) -> None:
        """Count one call less; accounts that nobody needs are forgotten."""
        account.calls -= 1
        self.calls -= 1
        if not account.calls:
            self.weight -= account.weight
            self._tidy()

    def charge(self, account: Account, cost: float) -> None:
        """Charge a tenant for a call that is served, and move the round on."""
        start, account.turn = account.turn, account.turn + cost / account.weight
        self._round = min(max(self._round + self._step, start), account.turn)
        self._step = cost / max(self.weight, account.weight)

    def clear(self) -> None:
        """Forget everybody."""
        self._accounts.clear()
        self._round = self._step = self.weight = 0.0
        self.calls = 0

    def _tidy(self) -> None:
        """Forget tenants without calls that owe nothing, or if they are too many, all but those that owe most."""
        if not self.calls:
            self.clear()
        elif len(self._accounts) > 2 * self.calls + _MIN_REMEMBERED:
            idle = {tenant: each for tenant, each in self._accounts.items() if not each.calls}
            owing = sorted((each.turn for each in idle.values()), reverse=True)
            paid = max(self._round, owing[len(idle) // 2])
            for tenant, each in idle.items():
                if each.turn <= paid:
                    del self._accounts[tenant]
