"""By what names policies keep their state in a store, and who takes them over."""

from __future__ import annotations

import pytest

from resilient_llm.policies._store_names import claim, claimed_anew


class Store:
    pass


def test_a_name_is_for_one_set_of_options_of_a_kind_in_a_store() -> None:
    store = Store()
    assert claim(store, "rates", "a", 1)
    assert claim(store, "rates", "a", 1)
    assert not claim(store, "rates", "a", 2)
    assert claim(store, "rates", "b", 2)
    assert claim(store, "circuits", "a", 2)
    assert claim(Store(), "rates", "a", 2)


def test_successors_may_have_the_names_with_options_of_their_own() -> None:
    store = Store()
    assert claim(store, "rates", "a", 1)
    assert claim(store, "rates", "kept", 1)
    with claimed_anew(store):
        assert claim(store, "rates", "a", 2)
        assert not claim(store, "rates", "a", 3)
    assert claim(store, "rates", "a", 2)
    assert not claim(store, "rates", "a", 1)
    assert not claim(store, "rates", "kept", 2)


def test_successors_that_are_never_made_change_nothing() -> None:
    store = Store()
    assert claim(store, "rates", "a", 1)

    def fail() -> None:
        with claimed_anew(store):
            assert claim(store, "rates", "a", 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert claim(store, "rates", "a", 1)
    assert not claim(store, "rates", "a", 2)


def test_without_a_store_there_is_nothing_to_claim() -> None:
    with claimed_anew(None):
        pass
