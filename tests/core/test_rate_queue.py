"""The rate queue: who is served, who is passed over, and when to look again."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import pytest

from resilient_llm.core.quota import Reservation
from resilient_llm.core.rate_queue import RateQueue
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import Ticket, TicketState, WaitingRoom

Weights = dict[str, float]


def empty(capacity: float = 10.0, rate: float = 1.0) -> TokenBucket:
    bucket = TokenBucket(capacity, rate, 0.0)
    bucket.take(capacity, 0.0)
    return bucket


class Queue:
    """A rate queue whose calls are named, and its clock."""

    def __init__(self, *, max_queued: int = 1_000, weights: Weights | None = None) -> None:
        self.queue = RateQueue[str](lambda: WaitingRoom(max_queued, weights=weights), max_queued)
        self.now = 0.0
        self.names: dict[Ticket[str], str] = {}
        self.served: list[str] = []
        self.expired: list[str] = []

    def push(
        self,
        name: str,
        *charges: tuple[TokenBucket, float],
        own: int = 0,
        lane: str = "",
        priority: int = 0,
        patience: float = inf,
    ) -> Ticket[str]:
        """Queue a call; its tenant is the first letter of its name, its cost that of its last charge."""
        ticket = self.queue.push(
            lane,
            name[0],
            Reservation(charges, own=own),
            self.now,
            cost=charges[-1][1],
            priority=priority,
            deadline=self.now + patience,
        )
        assert ticket is not None
        self.names[ticket] = name
        self.note(self.queue.advance(self.now))
        return ticket

    def note(self, over: list[Ticket[str]]) -> None:
        for ticket in over:
            granted = ticket.state is TicketState.GRANTED
            (self.served if granted else self.expired).append(self.names.pop(ticket))

    def go_on(self, until: float) -> None:
        """Advance the clock, looking again exactly when told to."""
        while self.queue.next_at <= until:
            assert self.queue.next_at >= self.now
            self.now = self.queue.next_at
            self.note(self.queue.advance(self.now))
        self.now = until


def test_one_tenant_is_served_in_order_each_when_there_is_enough() -> None:
    queue, bucket = Queue(), empty()
    for number, amount in enumerate([5.0, 1.0, 3.0]):
        queue.push(f"a{number}", (bucket, amount))
    assert queue.queue.next_at == pytest.approx(5)
    for until, served in [(4.9, []), (5.1, ["a0"]), (6.1, ["a0", "a1"]), (9.1, ["a0", "a1", "a2"])]:
        queue.go_on(until)
        assert queue.served == served
    assert queue.queue.next_at == inf
    assert len(queue.queue) == 0


def test_small_calls_do_not_overtake_a_large_one_for_ever() -> None:
    queue, bucket = Queue(), empty(capacity=100.0)
    queue.push("a", (bucket, 50.0))
    for number in range(60):
        queue.push(f"b{number}", (bucket, 1.0))
        queue.go_on(queue.now + 1)
    assert queue.served[0] == "a"


def test_what_is_given_back_is_granted_at_once() -> None:
    queue, bucket = Queue(), empty()
    queue.push("a", (bucket, 5.0))
    bucket.give_back(5.0, 0.0)
    queue.note(queue.queue.give_back("z", 0.0))
    assert queue.served == ["a"]


def test_a_tenant_whose_own_bucket_is_dry_holds_up_nobody() -> None:
    queue, shared = Queue(), TokenBucket(100.0, 1.0, 0.0)
    mine = empty(rate=0.1)
    queue.push("a", (mine, 1.0), (shared, 1.0), own=1)
    queue.push("b", (TokenBucket(10.0, 1.0, 0.0), 1.0), (shared, 1.0), own=1)
    assert queue.served == ["b"]
    assert queue.queue.next_at == pytest.approx(10)
    queue.go_on(10.1)
    assert queue.served == ["b", "a"]


def test_a_tenant_passed_over_comes_back_as_soon_as_something_is_given_back_to_it() -> None:
    queue, shared = Queue(), TokenBucket(100.0, 1.0, 0.0)
    mine = empty(rate=0.1)
    queue.push("a", (mine, 1.0), (shared, 1.0), own=1)
    mine.give_back(1.0, 0.0)
    queue.note(queue.queue.give_back("a", 0.0))
    assert queue.served == ["a"]


def test_a_tenant_that_is_passed_over_again_and_again_leaves_no_trail() -> None:
    queue, shared = Queue(), TokenBucket(100.0, 1.0, 0.0)
    mine = empty(rate=0.01)
    ticket = queue.push("a", (mine, 9.0), (shared, 1.0), own=1)
    for _ in range(1_000):  # calls of its own that give something back
        mine.give_back(0.001, queue.now)
        queue.note(queue.queue.give_back("a", queue.now))
    (lane,) = queue.queue._lanes.values()
    assert len(lane.asleep._heap) < 40
    assert queue.queue.next_at == pytest.approx(800)
    queue.queue.cancel(ticket)
    assert not lane.asleep


def test_a_dry_model_holds_up_nobody_who_asks_for_another() -> None:
    queue, account = Queue(), TokenBucket(100.0, 1.0, 0.0)
    slow, fast = empty(rate=0.1), TokenBucket(10.0, 1.0, 0.0)
    queue.push("a1", (slow, 1.0), (account, 1.0), lane="slow")
    queue.push("a2", (fast, 1.0), (account, 1.0), lane="fast")
    queue.push("b", (fast, 1.0), (account, 1.0), lane="fast")
    assert queue.served == ["a2", "b"]


def test_lanes_that_share_a_dry_bucket_take_turns() -> None:
    queue, account = Queue(), empty(rate=1.0)
    plenty = {lane: TokenBucket(1e6, 1.0, 0.0) for lane in "xy"}
    for number in range(10):
        for lane in "xy":
            queue.push(f"{lane}{number}", (plenty[lane], 1.0), (account, 1.0), lane=lane)
    queue.go_on(10.1)
    assert Counter(name[0] for name in queue.served) == {"x": 5, "y": 5}


def test_lanes_take_turns_by_cost_and_by_tenants() -> None:
    queue, account = Queue(max_queued=2_000), empty(capacity=1_000.0, rate=10.0)
    for number in range(400):
        queue.push(f"a{number}", (account, 1.0), lane="small")
        queue.push(f"b{number}", (account, 10.0), lane="large")
        queue.push(f"c{number}", (account, 10.0), lane="large")
    queue.go_on(90.0)
    used = Counter[str]()
    for name in queue.served:
        used[name[0]] += 1 if name[0] == "a" else 10
    assert used["a"] == pytest.approx(300, abs=20)
    assert used["b"] == pytest.approx(300, abs=20)
    assert used["c"] == pytest.approx(300, abs=20)


def test_a_lane_goes_ahead_of_one_before_it_only_where_that_delays_nobody() -> None:
    queue, account = Queue(), TokenBucket(10.0, 1.0, 0.0)
    model = empty(rate=0.5)
    queue.push("a", (model, 1.0), (account, 10.0), lane="waits")  # until 2, and then for 10 of the account
    queue.push("b", (account, 2.0), lane="other")  # refilled by then
    queue.push("c", (account, 1.0), lane="another")  # would be missing then
    assert queue.served == ["b"]
    queue.go_on(2.001)
    assert queue.served == ["b", "a"]
    queue.go_on(3.001)
    assert queue.served == ["b", "a", "c"]


@pytest.mark.parametrize("seed", range(5))
def test_a_call_that_needs_two_busy_buckets_is_not_starved(seed: int) -> None:
    rng = random.Random(seed)
    queue = Queue()
    first, second = empty(capacity=20.0), empty(capacity=20.0)
    queue.push("x", (first, 15.0), (second, 15.0), lane="both")
    for number in range(100):
        queue.push(f"a{number}", (first, rng.uniform(0.1, 2)), lane="first")
        queue.push(f"b{number}", (second, rng.uniform(0.1, 2)), lane="second")
        queue.go_on(queue.now + rng.uniform(0, 1))
    assert "x" in queue.served
    assert queue.served.index("x") < 30


def test_one_who_comes_back_at_once_does_not_starve_another_lane() -> None:
    queue, account = Queue(), empty(capacity=20.0)
    queue.push("b", (account, 10.0), lane="large")
    queue.push("a", (account, 1.0), lane="small")
    for _ in range(40):
        queue.go_on(queue.now + 0.5)
        if "a" not in queue.names.values():
            queue.push("a", (account, 1.0), lane="small")
    assert "b" in queue.served


def test_one_who_comes_back_at_once_gets_no_more_than_a_lane_with_a_backlog() -> None:
    queue, account = Queue(), empty(capacity=20.0)
    for number in range(200):
        queue.push(f"b{number}", (account, 1.0), lane="backlog")
    queue.push("a", (account, 5.0), lane="single")
    while queue.now < 200:
        queue.go_on(queue.queue.next_at)
        if "a" not in queue.names.values():
            queue.push("a", (account, 5.0), lane="single")
    assert queue.served.count("a") * 5 == pytest.approx(100, abs=10)


def test_whoever_cannot_be_served_in_time_is_refused_when_its_turn_comes() -> None:
    queue, bucket = Queue(), empty()
    queue.push("a1", (bucket, 5.0))
    queue.push("b1", (bucket, 3.0), patience=6.0)  # served at 8
    queue.push("a2", (bucket, 1.0))
    queue.go_on(5.001)
    assert queue.served == ["a1"]
    assert queue.expired == ["b1"]
    queue.go_on(6.001)
    assert queue.served == ["a1", "a2"]


def test_whoever_has_run_out_of_time_is_met_and_told() -> None:
    queue, bucket = Queue(), empty()
    queue.push("a1", (bucket, 5.0))
    queue.push("b1", (bucket, 1.0), patience=5.5)
    queue.now = 20.0  # nobody looked meanwhile
    queue.note(queue.queue.advance(queue.now))
    assert (queue.served, queue.expired) == (["a1"], ["b1"])


def test_the_delay_counts_what_the_tenant_already_waits_for() -> None:
    queue, bucket = Queue(), empty()
    reservation = Reservation([(bucket, 3.0)])
    assert queue.queue.delay("", "a", reservation, 0.0, 0).seconds == pytest.approx(3)
    ticket = queue.push("a", (bucket, 5.0))
    assert queue.queue.delay("", "a", reservation, 0.0, 0).seconds == pytest.approx(8)
    assert queue.queue.delay("", "a", reservation, 0.0, 1).seconds == pytest.approx(3), "it goes first"
    assert queue.queue.delay("", "b", reservation, 0.0, 0).seconds == pytest.approx(3), "at least"
    assert queue.queue.delay("elsewhere", "a", reservation, 0.0, 0).seconds == pytest.approx(3)
    queue.queue.cancel(ticket)
    assert queue.queue.delay("", "a", reservation, 0.0, 0).seconds == pytest.approx(3)


def test_the_delay_names_what_takes_longest() -> None:
    queue, one, two = Queue(), empty(), empty(rate=0.1)
    delay = queue.queue.delay("", "a", Reservation([(one, 5.0), (two, 1.0)]), 0.0, 0)
    assert delay.charge == 1
    assert delay.seconds == pytest.approx(10)


def test_a_higher_priority_goes_first_inside_its_tenant() -> None:
    queue, bucket = Queue(), empty()
    queue.push("x", (bucket, 1.0))  # already at the head
    queue.push("a1", (bucket, 1.0))
    queue.push("a2", (bucket, 1.0), priority=1)
    queue.go_on(5.0)
    assert queue.served == ["x", "a2", "a1"]


def test_the_queue_is_bounded_over_all_lanes() -> None:
    queue, bucket = Queue(max_queued=2), empty()
    queue.push("a", (bucket, 1.0), lane="one")
    queue.push("b", (bucket, 1.0), lane="two")
    assert queue.queue.push("three", "c", Reservation([(bucket, 1.0)]), 0.0, cost=1.0) is None
    assert len(queue.queue) == 2


def test_cancelling_the_head_lets_the_next_one_go() -> None:
    queue, bucket = Queue(), TokenBucket(10.0, 1.0, 0.0)
    bucket.take(8.0, 0.0)
    head = queue.push("a", (bucket, 5.0))
    queue.push("b", (bucket, 2.0))
    assert queue.queue.cancel(head)
    assert not queue.queue.cancel(head)
    queue.note(queue.queue.advance(0.0))
    assert queue.served == ["b"]


def test_lanes_are_forgotten_once_nobody_waits() -> None:
    queue, bucket = Queue(), empty(rate=100.0)
    for number in range(200):
        queue.push(f"a{number}", (bucket, 1.0), lane=f"lane {number}")
    queue.go_on(10.0)
    assert len(queue.served) == 200
    assert not queue.queue._lanes


def test_lanes_of_those_served_are_forgotten_while_others_wait() -> None:
    queue, bucket, dry = Queue(), empty(rate=100.0), empty(rate=1e-9)
    queue.push("x", (dry, 1.0), lane="for ever")
    for number in range(1_000):
        queue.push(f"a{number}", (bucket, 1.0), lane=f"lane {number}")
        queue.go_on(queue.now + 0.02)
    assert len(queue.served) == 1_000
    assert len(queue.queue._lanes) < 10


@pytest.mark.parametrize("costs", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 10.0, "b": 1.0, "c": 3.0}], ids=str)
def test_weights_are_honoured_by_cost_under_saturation(costs: dict[str, float]) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    queue, bucket = Queue(weights=weights, max_queued=100), empty(capacity=20.0, rate=100.0)
    used = Counter[str]()
    for tenant in "abc" * 5:
        queue.push(tenant, (bucket, costs[tenant]))
    while queue.now < 100:
        queue.go_on(queue.queue.next_at)
        for tenant in queue.served:
            used[tenant] += int(costs[tenant])
            queue.push(tenant, (bucket, costs[tenant]))
        queue.served.clear()
    for tenant, weight in weights.items():
        assert used[tenant] / sum(used.values()) == pytest.approx(weight / 7, rel=0.02)
    assert sum(used.values()) == pytest.approx(100 * 100, rel=0.01)


def keep_up(queue: Queue, offers: list[str], lanes: dict[str, TokenBucket], account: TokenBucket) -> None:
    """Keep calls waiting, each of a tenant in a lane (`a3`: tenant a, lane 3), for 200 s."""
    for offer in offers * 3:
        queue.push(offer, (lanes[offer[1]], 1.0), (account, 1.0), lane=offer[1])
    while queue.now < 200:
        begin = len(queue.served)
        queue.go_on(queue.queue.next_at)
        for offer in queue.served[begin:]:
            queue.push(offer, (lanes[offer[1]], 1.0), (account, 1.0), lane=offer[1])


def test_a_tenant_in_many_lanes_gets_no_more_than_one_in_a_single_lane() -> None:
    queue, account = Queue(), empty(rate=5.0)
    lanes = {str(number): TokenBucket(1e6, 1.0, 0.0) for number in range(10)}
    keep_up(queue, [f"a{number}" for number in range(10)] + ["b0"], lanes, account)
    served = Counter(queue.served)
    assert served["b0"] == pytest.approx(500, rel=0.03)
    for number in range(10):
        assert served[f"a{number}"] == pytest.approx(50, rel=0.3), "its own lanes take turns"


def test_weights_hold_over_lanes() -> None:
    queue, account = Queue(weights={"a": 9.0}), empty(rate=5.0)
    keep_up(queue, ["a0", "b1"], {lane: TokenBucket(1e6, 1.0, 0.0) for lane in "01"}, account)
    served = Counter(queue.served)
    assert served["a0"] / served["b1"] == pytest.approx(9, rel=0.05)


def test_lanes_that_share_nothing_do_not_count_for_each_other() -> None:
    queue, buckets = Queue(), [empty(), empty()]
    for _ in range(200):
        queue.push("a", (buckets[0], 1.0), lane="0")
        queue.push("a", (buckets[1], 1.0), lane="1")
        queue.push("b", (buckets[1], 1.0), lane="1")
    queue.go_on(100.1)
    assert Counter(queue.served)["b"] == pytest.approx(50, abs=2)


def test_a_tenant_has_so_many_places_over_all_lanes() -> None:
    queue = RateQueue[str](lambda: WaitingRoom(100, max_queued_per_tenant=3), 100)
    reservation = Reservation([(empty(), 1.0)])
    tickets = [queue.push(lane, "a", reservation, 0.0, cost=1.0) for lane in "0123"]
    assert [ticket is None for ticket in tickets] == [False, False, False, True]
    assert queue.push("3", "b", reservation, 0.0, cost=1.0) is not None
    assert tickets[0] is not None
    assert queue.cancel(tickets[0])
    assert queue.push("3", "a", reservation, 0.0, cost=1.0) is not None


@pytest.mark.parametrize("shares", [True, False], ids=["one account", "nothing in common"])
def test_an_event_looks_at_those_lanes_only_that_can_be_served(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    serve = RateQueue._serve

    def counted(*args: object) -> bool:
        nonlocal looks
        looks += 1
        return serve(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(RateQueue, "_serve", counted)
    queue, account = Queue(), empty(rate=10.0)
    for number in range(300):
        own = TokenBucket(10.0, 1.0, 0.0) if shares else empty()
        charges = [(own, 1.0), (account, 1.0)] if shares else [(own, 1.0)]
        queue.push("a", *charges, lane=str(number))
    queue.go_on(40.0)
    assert len(queue.served) == 300
    assert looks < 4 * 300


def test_whose_time_is_up_goes_wherever_it_stands() -> None:
    queue, bucket = Queue(max_queued=2), empty()
    queue.push("a0", (bucket, 9.0))
    queue.push("a1", (bucket, 1.0), patience=5)
    assert not queue.queue.is_behind(4.9)
    assert queue.queue.is_behind(5.0), "before anybody is refused for want of a place"
    queue.note(queue.queue.advance(5.0))
    assert (queue.served, queue.expired) == ([], ["a1"])
    queue.now = 5.0
    queue.push("a2", (bucket, 1.0))
    queue.go_on(20.0)
    assert queue.served == ["a0", "a2"]


def test_one_that_is_to_be_served_at_once_needs_no_place() -> None:
    queue, dry, full = Queue(max_queued=1), empty(), TokenBucket(10.0, 1.0, 0.0)
    queue.push("a0", (dry, 5.0), lane="x")
    reservation = Reservation([(full, 1.0)])
    assert queue.queue.push("y", "b", reservation, 0.0, cost=1.0) is None
    ticket = queue.queue.push("y", "b", reservation, 0.0, cost=1.0, at_once=True)
    assert ticket is not None
    assert queue.queue.advance(0.0) == [ticket]
    assert len(queue.queue) == 1


def test_who_is_before_a_call_and_for_what_it_waits_is_said() -> None:
    queue, account, plenty = Queue(), empty(), TokenBucket(100.0, 10.0, 0.0)
    queue.push("a0", (plenty, 1.0), (account, 6.0), lane="x")
    queue.go_on(4.0)
    in_lane = queue.queue.delay_by_others("x", "b", Reservation([(plenty, 1.0), (account, 2.0)]), 4.0, 0)
    assert in_lane.seconds == pytest.approx(4.0), "6 for the other and 2 of its own, of which 4 are there"
    in_another = queue.queue.delay_by_others("y", "b", Reservation([(plenty, 1.0), (account, 2.0)]), 4.0, 0)
    assert in_another.seconds == pytest.approx(2.0), "nobody at all is served before"
    assert (in_lane.charge, in_another.charge) == (1, 1)
    assert queue.queue.delay_by_others("y", "b", Reservation([(plenty, 200.0)]), 4.0, 0) == (2.0, 0)


def test_a_call_that_counts_for_nothing_is_served_in_turn_and_costs_its_tenant_nothing() -> None:
    queue, bucket = Queue(), empty()
    again = queue.queue.push("", "a", Reservation([(bucket, 5.0)]), 0.0, cost=0.0)
    assert again is not None
    queue.names[again] = "a0"
    for name, amount in [("b0", 3.0), ("a1", 5.0), ("b1", 3.0)]:
        queue.push(name, (bucket, amount))
    queue.go_on(20.0)
    assert queue.served == ["a0", "b0", "a1", "b1"], "else it would be b's turn again before a's"
