"""Keys as strings: the same in every process, and another for every key."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable
from datetime import date
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import pytest

from resilient_llm import ConfigurationError
from resilient_llm.shared_keys import OVERFLOW, account_name, is_shareable, shared_key


class Plan(enum.Enum):
    GOLD = "gold"
    FREE = "free"


class Region(enum.Enum):
    GOLD = "gold"


class Tier(enum.StrEnum):
    GOLD = "gold"


class MixedTier(str, enum.Enum):  # noqa: UP042 - the older kind, which shows itself otherwise
    GOLD = "gold"


class Level(enum.IntEnum):
    HIGH = 3


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Both(NamedTuple):
    tenant: str
    model: str


WRITTEN: dict[Hashable, str] = {
    "acme": "acme",
    "a b": "~acc9227cc02e5f5c13e74125bce89499",
    None: "!none",
    True: "!True",
    7: "!7",
    -7: "!-7",
    1.5: "!1.5",
    1e-7: "!1e-07",
    math.inf: "!inf",
    b"acme": "!bytes~bded55e7ce1c08f27738f8c77ec971e3",
    UUID(int=7): "!uuid~00000000000000000000000000000007",
    Plan.GOLD: "!enum~a0660a62f0eabdaf4e1720c42594f813",
    Plan.FREE: "!enum~dacc265c7d7dcd192ddef6480eb2f146",
    Region.GOLD: "!enum~557387f4b4355153dd876c6944d00b45",
    Rights.READ | Rights.WRITE: "!enum~72273060c9be8b6fc3382b6ccd26b76b",
    ("acme", None, 7): "(acme,!none,!7)",
    ("acme", UUID(int=7)): "(acme,!uuid~00000000000000000000000000000007)",
    OVERFLOW: "!more",
}
"""What stores know keys by: to write one otherwise is to lose what they keep for it."""


@pytest.mark.parametrize("key", WRITTEN, ids=repr)
def test_each_key_has_a_string_of_its_own(key: Hashable) -> None:
    written = shared_key(key)
    assert written == WRITTEN[key]
    assert type(written) is str
    assert not set(written) & set("{}: ")
    assert is_shareable(key)
    assert [shared_key(one) for one in WRITTEN].count(written) == 1
    assert [account_name(one) for one in WRITTEN].count(account_name(key)) == 1


@pytest.mark.parametrize(
    ("key", "plain"),
    [
        (Tier.GOLD, "gold"),
        (MixedTier.GOLD, "gold"),
        (Level.HIGH, 3),
        (2.0, 2),
        (1e300, int(1e300)),
        (Both("acme", "gpt-4o"), ("acme", "gpt-4o")),
    ],
    ids=repr,
)
def test_what_is_equal_is_written_the_same(key: Hashable, plain: Hashable) -> None:
    assert key == plain
    assert shared_key(key) == shared_key(plain)
    assert f"{shared_key(key)}" == str(shared_key(plain))


@pytest.mark.parametrize(
    "key",
    [object(), frozenset("a"), math.nan, Decimal(1), date(2026, 1, 1), ("acme", frozenset("a")), Rights(0)],
    ids=["object", "frozenset", "nan", "Decimal", "date", "in a tuple", "nameless flag"],
)
def test_what_others_may_write_otherwise_is_refused_with_what_may_be(key: Hashable) -> None:
    assert not is_shareable(key)
    with pytest.raises(
        ConfigurationError, match=r"is kept by str, int, float, bool, bytes, UUID, members of an Enum"
    ):
        shared_key(key)
