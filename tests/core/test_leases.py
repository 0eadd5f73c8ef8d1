"""Whatever is asked, given back, renewed or forgotten: the table keeps its promises."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilient_llm.core.leases import LeaseLimit, LeaseTable, Woken

MOST = {"one": 2, "two": 3}
LASTS = 10.0


class Leases(RuleBasedStateMachine):
    """Holders that release, renew or vanish, and places that are kept or left."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.serial = 0
        self.ends: dict[str, tuple[float, list[LeaseLimit]]] = {}  # by what their holders may rely on
        self.beside: set[str] = set()

    @rule(seconds=st.sampled_from([0.1, 3.0, 9.9, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        keys=st.lists(st.sampled_from(sorted(MOST)), min_size=1, unique=True),
        place=st.sampled_from(["", "a", "b", "c"]),
        wait=st.booleans(),
    )
    def acquire(self, keys: list[str], place: str, wait: bool) -> None:
        self.serial += 1
        name = str(self.serial)
        limits = [LeaseLimit(key, MOST[key]) for key in keys]
        place_lasts = 2.0 if wait and place else 0.0
        answer = self.table.acquire(name, limits, self.now, lasts=LASTS, place=place, place_lasts=place_lasts)
        if answer.refused is None:
            self.ends[name] = self.now + LASTS, limits
            for key in keys:
                assert self.alive(key) <= MOST[key] + len(self.beside)
            assert answer.held == self.table.held(keys[-1])
        else:
            assert answer.held <= self.table.held(answer.refused) or not answer.held

    @rule(data=st.data(), place=st.sampled_from(["", "a", "b"]))
    def release(self, data: st.DataObject, place: str) -> None:
        if not self.ends:
            return
        name = data.draw(st.sampled_from(sorted(self.ends)))
        _, limits = self.ends.pop(name)
        self.beside.discard(name)
        woken = self.table.release(limits, self.now, lease=name, place=place)
        assert len(woken) == len(set(woken))
        for each in woken:
            assert isinstance(each, Woken)
            assert each.place not in ("", place)
            assert self.table.held(each.key) < MOST[each.key]

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        if not self.ends:
            return
        name = data.draw(st.sampled_from(sorted(self.ends)))
        end, limits = self.ends[name]
        lost = self.table.renew([(key, name) for key, _ in limits], self.now, lasts=LASTS)
        if lost:
            assert end <= self.now, "never before its time"
            self.beside.add(name)
        self.ends[name] = self.now + LASTS, limits

    @rule()
    def all_vanish_and_all_is_free_again(self) -> None:
        self.now += LASTS + 2.0
        for key, most in MOST.items():
            limit = [LeaseLimit(key, most)]
            names = [f"{self.now} {index}" for index in range(most + 1)]
            got = [self.table.acquire(name, limit, self.now).refused for name in names]
            assert got == [None] * most + [key]
            for name in names:
                self.table.release(limit, self.now, lease=name)

    @invariant()
    def what_is_held_is_counted(self) -> None:
        for key in MOST:
            assert self.alive(key) <= self.table.held(key)

    def alive(self, key: str) -> int:
        return sum(
            end > self.now and key in [limit.key for limit in limits] for end, limits in self.ends.values()
        )


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_who_is_first_in_line_is_served_first() -> None:
    table = LeaseTable()
    limit = [LeaseLimit("k", 1)]
    assert table.acquire("1", limit, 0.0, lasts=LASTS).refused is None
    assert table.acquire("2", limit, 0.0, place="a", place_lasts=5).refused == "k"
    assert table.acquire("3", limit, 1.0, place="b", place_lasts=5).refused == "k"
    assert table.release(limit, 2.0, lease="1") == [Woken("a", "k")]
    assert table.acquire("4", limit, 2.0).refused == "k", "newcomers do not pass by"
    assert table.acquire("5", limit, 2.0, place="b", place_lasts=5).refused == "k"
    assert table.acquire("6", limit, 2.0, place="a").refused is None
    assert table.release(limit, 3.0, lease="6") == [Woken("b", "k")]
    assert table.acquire("7", limit, 6.5).refused == "k"
    assert table.acquire("8", limit, 7.0).refused is None, "who did not come back is forgotten"


def test_keys_nobody_uses_are_forgotten() -> None:
    table = LeaseTable()
    for index in range(1_000):
        limit = [LeaseLimit(str(index), 1)]
        table.acquire("x", limit, float(index), lasts=5.0)
        if index % 2:
            table.release(limit, float(index), lease="x")
    assert len(table) < 200
