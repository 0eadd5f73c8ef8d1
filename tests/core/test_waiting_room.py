"""The waiting room: whose turn it is, whatever comes, goes and expires meanwhile."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.waiting_room import WaitingRoom


def push(
    room: WaitingRoom[str],
    tenant: str,
    now: float = 0.0,
    *,
    cost: float = 1.0,
    priority: int = 0,
    deadline: float = inf,
) -> Ticket[str]:
    ticket = room.push(tenant, now, cost=cost, priority=priority, deadline=deadline)
    assert ticket is not None
    return ticket


def serve(room: WaitingRoom[str], now: float = 0.0) -> Ticket[str] | None:
    head = room.head(now)
    if head is None:
        return None
    assert room.pop() is head
    assert head.state is TicketState.GRANTED
    return head


def drain(room: WaitingRoom[str], now: float = 0.0) -> Iterator[Ticket[str]]:
    while (ticket := serve(room, now)) is not None:
        yield ticket


# --- One tenant


def test_one_tenant_is_served_first_come_first_served() -> None:
    room = WaitingRoom[str](100)
    tickets = [push(room, "a", now=float(i // 3), cost=100.0 - i) for i in range(100)]
    assert list(drain(room, 50.0)) == tickets


def test_a_higher_priority_goes_first_inside_its_tenant_only() -> None:
    room = WaitingRoom[str](100)
    slow = push(room, "a")
    fast = push(room, "a", priority=5)
    other = push(room, "b", priority=-5)
    assert list(drain(room)) == [fast, other, slow]


def test_waiting_counts_as_priority() -> None:
    room = WaitingRoom[str](100, ageing=10.0)
    old = push(room, "a", now=0.0, priority=0)
    passes = push(room, "a", now=9.9, priority=1)
    too_late = push(room, "a", now=10.1, priority=1)
    assert list(drain(room, 10.1)) == [passes, old, too_late]


def test_without_ageing_priority_counts_for_nothing() -> None:
    room = WaitingRoom[str](100, ageing=0.0)
    tickets = [push(room, "a", priority=p) for p in (0, 3, -2, 9)]
    assert list(drain(room)) == tickets


# --- Shares


@pytest.mark.parametrize("costs", list(itertools.permutations([100.0, 1_000.0, 10_000.0])), ids=str)
def test_shares_follow_the_weights_by_cost_when_costs_differ_a_hundredfold(costs: tuple[float, ...]) -> None:
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    cost_of = dict(zip(weights, costs, strict=True))
    room = WaitingRoom[str](100, weights=weights)
    for tenant, cost in cost_of.items():
        push(room, tenant, cost=cost)
        push(room, tenant, cost=cost)
    used = Counter[str]()
    while sum(used.values()) < 700 * 10_000:
        ticket = serve(room)
        assert ticket is not None
        used[ticket.tenant] += int(ticket.cost)
        push(room, ticket.tenant, cost=ticket.cost)
    total = sum(used.values())
    for tenant, weight in weights.items():
        assert used[tenant] / total == pytest.approx(weight / 7, rel=0.02)


def test_shares_follow_the_weights_by_calls_without_bursts() -> None:
    room = WaitingRoom[str](10_000, weights=lambda tenant: {"b": 2.0, "c": 4.0}.get(tenant, 1.0))
    for _ in range(1_000):
        for tenant in "abc":
            push(room, tenant)
    order = "".join(ticket.tenant for ticket in itertools.islice(drain(room), 1_750))
    assert Counter(order) == {"a": 250, "b": 500, "c": 1_000}
    assert "cccc" not in order, "a heavy weight is served often, not in one go"


class Drift:
    """How far apart, as cost over weight, two tenants came while both waited all the time."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.most = 0.0
        self._weights = weights
        self._served = dict.fromkeys(weights, 0.0)
        self._between: dict[tuple[str, str], list[float]] = {}

    def serve(self, room: WaitingRoom[str]) -> bool:
        waiting = sorted(room.depths())
        self._note(waiting)
        ticket = serve(room)
        if ticket is None:
            return False
        self._served[ticket.tenant] += ticket.cost / self._weights[ticket.tenant]
        self._note(waiting)
        still = set(room.depths())
        self._between = {pair: seen for pair, seen in self._between.items() if still.issuperset(pair)}
        return True

    def _note(self, waiting: list[str]) -> None:
        for pair in itertools.combinations(waiting, 2):
            seen = self._between.setdefault(pair, [])
            seen.append(self._served[pair[0]] - self._served[pair[1]])
            self.most = max(self.most, max(seen) - min(seen))


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([1.0, 3.0, 100.0, 10_000.0]), st.integers(0, 2)),
        min_size=20,
        max_size=120,
    ),
    credit=st.sampled_from([0, 1, 8]),
)
def test_tenants_that_wait_throughout_are_served_alike_to_within_two_calls_and_credit(
    weights: list[float], steps: list[tuple[int, float, int]], credit: int
) -> None:
    by_tenant = {str(i): weight for i, weight in enumerate(weights)}
    room = WaitingRoom[str](60, weights=by_tenant, credit=credit)
    drift = Drift(by_tenant)
    largest = 0.0
    for number, cost, serves in steps:
        tenant = str(number % len(weights))
        room.push(tenant, 0.0, cost=cost)
        largest = max(largest, cost / by_tenant[tenant])
        for _ in range(serves if len(room) > 5 else serves // 2):
            drift.serve(room)
    while drift.serve(room):
        pass
    assert drift.most <= (2 + credit) * largest * (1 + 1e-9)


# --- Newcomers


def test_a_backlog_of_ten_thousand_does_not_delay_another_tenants_call() -> None:
    room = WaitingRoom[str](20_000)
    for _ in range(10_000):
        push(room, "noisy")
    for _ in range(500):
        assert serve(room) is not None
        quiet = push(room, "quiet")
        assert serve(room) is quiet, "noisy had the last turn"


@settings(max_examples=60)
@given(
    noisy=st.lists(st.sampled_from([1.0, 50.0, 1_000.0]), min_size=50, max_size=50),
    quiet=st.sampled_from([1.0, 5_000.0]),
    weight=st.sampled_from([0.25, 1.0, 8.0]),
    before=st.integers(0, 40),
    committed=st.booleans(),
)
def test_one_backlog_puts_at_most_one_call_before_a_newcomer(
    noisy: list[float], quiet: float, weight: float, before: int, committed: bool
) -> None:
    room = WaitingRoom[str](100, weights={"noisy": weight}, credit=16)
    for cost in noisy:
        push(room, "noisy", cost=cost)
    for _ in range(before):
        serve(room)
    if committed:
        room.head(0.0)
    ticket = push(room, "quiet", cost=quiet)
    assert ticket in [serve(room), serve(room)]


@settings(max_examples=60)
@given(
    backlogs=st.lists(st.sampled_from([1.0, 7.0, 100.0]), min_size=2, max_size=6),
    warm_up=st.integers(0, 60),
    credit=st.sampled_from([0, 16]),
)
def test_many_backlogs_put_one_call_each_before_a_newcomer_and_what_they_earn_during_one_call(
    backlogs: list[float], warm_up: int, credit: int
) -> None:
    room = WaitingRoom[str](10_000, credit=credit)
    cost_of = {str(i): cost for i, cost in enumerate(backlogs)}
    for tenant, cost in cost_of.items():
        for _ in range(300):
            push(room, tenant, cost=cost)
    for _ in range(warm_up):
        serve(room)
    ticket = push(room, "quiet")
    ahead = Counter(each.tenant for each in itertools.takewhile(lambda each: each is not ticket, drain(room)))
    for tenant, calls in ahead.items():
        assert (calls - 1) * cost_of[tenant] <= max(backlogs)
    if len(set(backlogs)) == 1:
        assert set(ahead.values()) <= {1}


@settings(max_examples=40)
@given(
    arrivals=st.lists(st.integers(0, 6), min_size=50, max_size=300),
    costs=st.lists(st.sampled_from([1.0, 5.0]), min_size=1, max_size=7),
    credit=st.sampled_from([0, 16]),
)
def test_newcomers_without_end_starve_nobody(arrivals: list[int], costs: list[float], credit: int) -> None:
    room = WaitingRoom[str](50, max_queued_per_tenant=5, credit=credit)
    names = (f"once-{i}" for i in itertools.count())
    prices = itertools.cycle(costs)
    for _ in range(5):
        push(room, "patient", cost=costs[0])
    waited = most = 0
    for newcomers in itertools.cycle(arrivals):
        for _ in range(newcomers):
            room.push(next(names), 0.0, cost=next(prices))
        ticket = serve(room)
        most = max(most, len(room._queues))
        if ticket is None or ticket.tenant != "patient":
            waited += 1
            assert waited <= 2 * most * max(costs) / min(costs)
        elif room.depth("patient"):
            waited = 0
        else:
            return


def test_cancelled_newcomers_do_not_move_the_round_on() -> None:
    room = WaitingRoom[str](100, weights={"there": 0.25})
    for _ in range(2):
        push(room, "in debt", cost=100.0)
    serve(room)
    for _ in range(5):
        push(room, "there")
    assert [ticket.tenant for ticket in itertools.islice(drain(room), 2)] == ["there", "there"]
    for i in range(20):
        newcomer = push(room, f"newcomer-{i}")
        assert room.head(0.0) is newcomer
        room.remove(newcomer)


def test_leaving_and_coming_back_pays_no_debt_off() -> None:
    """Closed loops: each has one call at a time in the queue, so every queue runs empty at each turn."""
    room = WaitingRoom[str](100)
    cost_of = {"heavy": 1_000.0, "light": 10.0, "backlog": 100.0}
    for tenant, cost in cost_of.items():
        push(room, tenant, cost=cost)
    used = Counter[str]()
    for _ in range(20_000):
        ticket = serve(room)
        assert ticket is not None
        used[ticket.tenant] += int(ticket.cost)
        push(room, ticket.tenant, cost=ticket.cost)
    assert max(used.values()) - min(used.values()) <= 2_000


def test_having_been_away_saves_no_credit_up() -> None:
    room = WaitingRoom[str](1_000)
    for _ in range(500):
        push(room, "there")
    for _ in range(300):
        serve(room)
    for _ in range(100):
        push(room, "back")
    order = "".join(ticket.tenant[0] for ticket in itertools.islice(drain(room), 100))
    assert order == "bt" * 50


# --- Credit


def busy(credit: int, *, known: Iterable[str] = ("quiet",), grants: int = 100) -> WaitingRoom[str]:
    """Give a room with a backlog of noisy's, in which `known` have been served once, so many grants ago."""
    room = WaitingRoom[str](10_000, credit=credit)
    for _ in range(5_000):
        push(room, "noisy")
    for tenant in known:
        push(room, tenant)
    while not room.depths().keys().isdisjoint(known):
        serve(room)
    for _ in range(grants):
        serve(room)
    return room


def order_of(room: WaitingRoom[str], grants: int) -> str:
    return "".join(ticket.tenant[0] for ticket in itertools.islice(drain(room), grants))


def test_the_burst_of_a_tenant_that_had_less_than_its_share_is_served_in_one_go() -> None:
    room = busy(credit=8)
    for _ in range(20):
        push(room, "quiet")
    order = order_of(room, 40)
    assert order.startswith("q" * 8)
    assert order[8:].startswith(("qnqnqnqn", "nqnqnqnq")), "the rest of it has its turn, as anybody's"
    assert Counter(order) == {"q": 20, "n": 20}


def test_credit_is_what_a_share_was_not_used_for_and_no_more() -> None:
    room = busy(credit=8, grants=3)
    for _ in range(20):
        push(room, "quiet")
    order = order_of(room, 20)
    assert 3 <= len(order) - len(order.lstrip("q")) <= 4


def test_credit_spent_is_earned_again_at_the_pace_of_a_share() -> None:
    room = busy(credit=8)
    for _ in range(30):
        for _ in range(4):
            push(room, "quiet")
        assert order_of(room, 4) == "qqqq", "half of all, in bursts of four"
        assert order_of(room, 4) == "nnnn"


def test_a_tenant_nobody_knows_has_no_credit() -> None:
    room = busy(credit=8)
    for _ in range(20):
        push(room, "unknown")
    assert order_of(room, 20) in ("un" * 10, "nu" * 10)


def test_calls_served_on_credit_put_newcomers_before_nobody() -> None:
    """The round stands still meanwhile: whoever comes in then is not ahead of the backlog either."""
    room = busy(credit=8)
    for _ in range(8):
        push(room, "quiet")
    for _ in range(8):
        ticket = serve(room)
        assert ticket is not None
        assert ticket.tenant == "quiet"
        push(room, "unknown")
    assert order_of(room, 10) in ("un" * 5, "nu" * 5)


def test_a_tenant_that_catches_up_after_heavy_calls_of_others_is_not_on_credit() -> None:
    """The round goes back to it, or newcomers would stand behind all that it is owed for those."""
    room = WaitingRoom[str](1_000, credit=16)
    for tenant in ("heavy", "other heavy"):
        for _ in range(2):
            push(room, tenant, cost=1_000.0)
    for _ in range(500):
        push(room, "light")
    assert [ticket.tenant for ticket in itertools.islice(drain(room), 4)][2:] == ["light", "light"]
    newcomer = push(room, "new")
    assert newcomer in [serve(room), serve(room)]


def test_who_comes_back_with_credit_does_not_displace_the_head() -> None:
    room = busy(credit=8)
    head = room.head(0.0)
    quiet = push(room, "quiet")
    assert room.head(0.0) is head
    assert room.pop() is head
    assert serve(room) is quiet
    assert {ticket.tenant for ticket in itertools.islice(drain(room), 50)} == {"noisy"}


def test_a_call_that_gives_up_has_spent_no_credit() -> None:
    room = busy(credit=8)
    tickets = [push(room, "quiet") for _ in range(8)]
    assert serve(room) is tickets[0]
    for ticket in tickets[1:]:
        room.remove(ticket)
    assert order_of(room, 5) == "nnnnn"
    for _ in range(8):
        push(room, "quiet")
    assert order_of(room, 8) == "q" * 8


def test_credit_is_counted_in_calls_like_the_one_a_tenant_comes_back_with() -> None:
    room = WaitingRoom[str](10_000, credit=4)
    for _ in range(5_000):
        push(room, "there", cost=7.0)
    push(room, "back", cost=50.0)
    for _ in range(4_000):
        serve(room)
    for _ in range(20):
        push(room, "back", cost=50.0)
    order = order_of(room, 12)
    assert order.startswith("bbbb"), "and it was owed ten times as much"
    assert "tttttt" in order


@settings(max_examples=40)
@given(
    returns=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=20, max_size=120),
    credit=st.sampled_from([0, 2, 16]),
)
def test_those_who_come_back_with_credit_starve_nobody(returns: list[tuple[int, int]], credit: int) -> None:
    known = [f"known-{number}" for number in range(10)]
    room = busy(credit, known=known)
    waited = served = 0
    for number, calls in itertools.cycle(returns):
        for _ in range(calls):
            push(room, known[number])
        for _ in range(3):
            ticket = serve(room)
            assert ticket is not None
            waited = 0 if ticket.tenant == "noisy" else waited + 1
            served += ticket.tenant == "noisy"
            assert waited <= 2 * 11 + (credit + 2) * 10
        if served > 10 or len(room) > 9_000:
            return


@pytest.mark.parametrize("in_debt", [True, False])
def test_tens_of_thousands_of_tenants_seen_are_not_all_remembered_for_their_credit(in_debt: bool) -> None:
    room = WaitingRoom[str](100, credit=16)
    for _ in range(50):
        push(room, "noisy", cost=1.0)
    for number in range(20_000):
        ticket = push(room, str(number), cost=1e3 if in_debt else 1e-3)
        while ticket.state is TicketState.WAITING:
            assert serve(room) is not None
        while room.depth("noisy") < 50:
            push(room, "noisy")
        assert len(room) == 50
        assert len(room._queues) <= 201
        assert len(room._away) <= 100
    if not in_debt:
        assert set(room._away) <= {str(number) for number in range(19_800, 20_000)}, "those who left last"


def test_a_cancelled_call_of_a_suspended_tenant_does_not_displace_the_head() -> None:
    room = WaitingRoom[str](10)
    push(room, "a")
    ticket = push(room, "c")
    room.head(0.0)
    room.pop()
    room.suspend("c")
    next_one = push(room, "a")
    push(room, "b")
    assert room.head(0.0) is not ticket
    room.remove(ticket)
    push(room, "c")
    assert {each.tenant for each in drain(room)} == {"a", "b", "c"}
    assert next_one.state is TicketState.GRANTED


# --- Bounds


def test_the_room_is_bounded_in_all_and_by_tenant() -> None:
    room = WaitingRoom[str](5, max_queued_per_tenant=3)
    assert [room.push("a", 0.0) is not None for _ in range(5)] == [True, True, True, False, False]
    assert [room.push("b", 0.0) is not None for _ in range(3)] == [True, True, False]
    assert (len(room), room.depth("a"), room.depth("b"), room.depth("c")) == (5, 3, 2, 0)
    assert room.depths() == {"a": 3, "b": 2}
    assert [room.is_full(tenant, 0.0) for tenant in "abc"] == [True, True, True]
    assert serve(room) is not None
    assert [room.is_full(tenant, 0.0) for tenant in "abc"] == [False, False, False]
    assert WaitingRoom[str](0).push("a", 0.0) is None


def test_nothing_is_remembered_once_nobody_waits() -> None:
    room = WaitingRoom[str](1_000, credit=16)
    tickets = [push(room, str(i), cost=i + 1.0) for i in range(1_000)]
    assert room.tenants == 1_000
    for ticket in tickets[:500]:
        room.remove(ticket)
    assert len(list(drain(room))) == 500
    assert (len(room), room.tenants, room._queues, room._line, len(room._away)) == (0, 0, {}, [], 0)
    assert room.depths() == {}


@pytest.mark.parametrize("cancel", [True, False])
@pytest.mark.parametrize("always_waiting", [1, 99])
def test_tens_of_thousands_of_tenants_seen_leave_memory_bounded(cancel: bool, always_waiting: int) -> None:
    room = WaitingRoom[str](100)
    names = (str(i) for i in itertools.count())
    for _ in range(always_waiting):
        push(room, next(names), cost=1e6)
    for name in itertools.islice(names, 30_000):
        ticket = push(room, name, cost=1e6)
        if cancel:
            room.remove(ticket)
        else:
            serve(room)
        assert len(room) == always_waiting
        assert len(room._queues) == len(room._line) <= 201


def test_a_debt_is_remembered_though_many_come_and_go() -> None:
    room = WaitingRoom[str](100)
    for _ in range(50):
        push(room, "backlog")
    push(room, "heavy", cost=40.0)
    assert {"heavy", "backlog"} == {ticket.tenant for ticket in itertools.islice(drain(room), 2)}
    for i in range(1_000):
        room.remove(push(room, str(i)))
    push(room, "heavy")
    assert {ticket.tenant for ticket in itertools.islice(drain(room), 30)} == {"backlog"}


def test_cancelled_tickets_leave_no_tombstones_behind() -> None:
    room = WaitingRoom[str](10)
    first = push(room, "a")
    for _ in range(1_000):
        room.remove(push(room, "a"))
    assert len(room._queues["a"].entries) < 30
    assert list(drain(room)) == [first]


# --- The head


def test_the_head_stays_whoever_comes() -> None:
    room = WaitingRoom[str](100)
    head = push(room, "a", deadline=5.0)
    assert room.head(0.0) is head
    urgent = push(room, "a", priority=9)
    push(room, "b")
    assert room.head(4.9) is head
    assert len(room) == 3
    assert room.remove(head)
    assert head.state is TicketState.CANCELLED
    assert not room.remove(head)
    assert room.head(4.9) is urgent


def test_pop_grants_only_what_head_returned() -> None:
    room = WaitingRoom[str](100)
    push(room, "a")
    with pytest.raises(LookupError):
        room.pop()
    assert serve(room) is not None
    with pytest.raises(LookupError):
        room.pop()


def test_a_passed_deadline_is_never_granted() -> None:
    room = WaitingRoom[str](100)
    late = [push(room, "a", deadline=1.0), push(room, "b", deadline=2.0)]
    in_time = push(room, "b", deadline=2.1)
    assert room.head(0.0) is late[0]
    assert room.head(2.0) is in_time
    assert room.take_expired() == late
    assert room.take_expired() == []
    assert {ticket.state for ticket in late} == {TicketState.EXPIRED}
    assert not room.remove(late[0])
    assert len(room) == 1


def test_a_suspended_tenant_is_passed_over_and_comes_back_without_credit() -> None:
    room = WaitingRoom[str](1_000)
    head = push(room, "a")
    for _ in range(100):
        push(room, "a")
        push(room, "b")
    assert room.head(0.0) is head
    room.suspend("a")
    room.suspend("nobody")
    room.resume("nobody")
    assert {ticket.tenant for ticket in itertools.islice(drain(room), 50)} == {"b"}
    room.resume("a")
    assert serve(room) is head, "the head gave way and kept its place inside its tenant"
    order = "".join(ticket.tenant for ticket in itertools.islice(drain(room), 40))
    assert Counter(order)["a"] in (19, 20, 21)
    room.suspend("a")
    room.suspend("b")
    assert room.head(0.0) is None
    assert len(room) == 110


def test_a_suspended_tenant_whose_calls_are_cancelled_starts_anew() -> None:
    room = WaitingRoom[str](10)
    tickets = [push(room, "a"), push(room, "a")]
    other = push(room, "b")
    room.suspend("a")
    assert room.head(0.0) is other
    for ticket in tickets:
        room.remove(ticket)
    again = push(room, "a")
    assert list(drain(room)) == [other, again]


# --- Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_queued": -1}, "max_queued=-1: allowed are integers from 0"),
        ({"max_queued_per_tenant": 0}, "max_queued_per_tenant=0: allowed"),
        ({"ageing": -1.0}, "ageing=-1.0: allowed"),
        ({"credit": -1}, "credit=-1: allowed are integers from 0"),
        ({"ageing": inf}, "ageing=inf: allowed"),
        ({"weights": {"a": 0.0}}, "weights: 0.0 for tenant 'a': allowed"),
        ({"weights": {"a": nan}}, "weights: nan for tenant 'a': allowed"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WaitingRoom[str](**{"max_queued": 5, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [0.0, -1.0, inf, nan])
def test_a_cost_is_positive_and_finite(cost: float) -> None:
    room = WaitingRoom[str](5)
    with pytest.raises(ValueError, match="cost="):
        room.push("a", 0.0, cost=cost)
    assert len(room) == 0


def test_a_weight_from_a_function_is_checked_when_it_is_read() -> None:
    room = WaitingRoom[str](5, weights=lambda _: -2.0)
    with pytest.raises(ValueError, match=r"weights: -2.0 for tenant 'a'"):
        room.push("a", 0.0)
    assert (len(room), room._queues) == (0, {})


def test_a_ticket_says_what_it_is() -> None:
    ticket = push(WaitingRoom[str](5), "a", now=3.0, cost=250.0, deadline=9.0)
    assert repr(ticket) == "<Ticket waiting tenant='a' cost=250 priority=0>"
    assert (ticket.enqueued_at, ticket.deadline, ticket.waiter) == (3.0, 9.0, None)
