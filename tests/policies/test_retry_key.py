"""The key by which a provider knows a repeated request."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.policies.retry import _version_4


@given(st.integers(0, 2**128 - 1))
def test_random_bits_are_written_as_a_uuid(bits: int) -> None:
    assert _version_4(bits) == str(UUID(int=bits, version=4))
