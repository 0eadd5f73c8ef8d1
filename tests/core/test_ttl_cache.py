"""The cache of bytes against a naive model, over random histories."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from resilient_llm.core.ttl_cache import ENTRY_OVERHEAD, TTLCache

KEYS = st.sampled_from("abcdefgh")
TTLS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])
SIZES = st.sampled_from([0, 1, 50, 400, 900, 2500])


class CacheMachine(RuleBasedStateMachine):
    """The model is a list, used longest ago first, from which everything is worked out again."""

    @initialize(max_size=st.sampled_from([300, 1000, 2000, 4000]))
    def build(self, max_size: int) -> None:
        self.max_size = max_size
        self.cache = TTLCache(max_size)
        self.now = 100.0
        self.entries: list[tuple[str, bytes, float]] = []
        self.puts = 0

    def size(self) -> int:
        return sum(len(key) + len(value) + ENTRY_OVERHEAD for key, value, _ in self.entries)

    def without(self, key: str) -> list[tuple[str, bytes, float]]:
        return [entry for entry in self.entries if entry[0] != key]

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, size=SIZES, ttl=TTLS)
    def put(self, key: str, size: int, ttl: float) -> None:
        self.puts += 1
        value = str(self.puts).encode().ljust(size, b".")
        self.entries = [entry for entry in self.without(key) if entry[2] > self.now]
        kept = len(key) + len(value) + ENTRY_OVERHEAD <= self.max_size and ttl > 0
        if kept:
            self.entries.append((key, value, self.now + ttl))
            while self.size() > self.max_size:
                del self.entries[0]
        assert self.cache.put(key, value, self.now, ttl) is kept

    @rule(key=KEYS, earlier=st.sampled_from([0.0, 0.0, 5.0]))
    def get(self, key: str, earlier: float) -> None:
        if earlier:
            self.cache.get("nothing", self.now)  # so that this is the latest time it has heard of
        found = [entry for entry in self.entries if entry[0] == key and entry[2] > self.now]
        if found:
            self.entries = [*self.without(key), found[0]]
        expected = (found[0][1], found[0][2] - self.now) if found else None
        assert self.cache.get(key, self.now - earlier) == expected

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.cache.get("nothing", self.now)
        live = any(entry[0] == key and entry[2] > self.now for entry in self.entries)
        self.entries = self.without(key)
        assert self.cache.delete(key) is live

    @rule()
    def clear(self) -> None:
        self.entries = []
        self.cache.clear()

    @invariant()
    def it_stays_within_its_bounds(self) -> None:
        assert self.cache.size <= self.max_size
        self.cache.get("nothing", self.now)
        self.entries = [entry for entry in self.entries if entry[2] > self.now]
        assert (len(self.cache), self.cache.size) == (len(self.entries), self.size())
        assert len(self.cache._expiries) <= 2 * len(self.cache) + 65


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=40)


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    cache = TTLCache(10 * (ENTRY_OVERHEAD + 20))
    for n in range(10_000):
        cache.put(f"{n % 15}", b"value", n / 1000, 1000.0)
    assert len(cache) <= 10
    assert len(cache._expiries) <= 90


def test_what_has_expired_goes_before_what_was_used_long_ago() -> None:
    cache = TTLCache(2 * (ENTRY_OVERHEAD + 2))
    cache.put("a", b"1", 0.0, 100.0)
    cache.put("b", b"2", 0.0, 1.0)
    cache.put("c", b"3", 2.0, 100.0)
    assert [cache.get(key, 2.0) is not None for key in "abc"] == [True, False, True]


def test_a_cache_needs_room() -> None:
    with pytest.raises(ValueError, match="max_size=0: must be at least 1"):
        TTLCache(0)
