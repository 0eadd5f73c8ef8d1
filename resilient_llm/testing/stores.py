"""The conformance suite of stores: what any store of policies' state must do, for those who write one.

Run every check of a part against a function that makes your store, as another process would make it:

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", RATE_CHECKS, ids=lambda check: check.__name__)
    async def test_my_store_conforms(check):
        async with my_server() as server:
            await check(lambda: MyStore(server))

A check raises `AssertionError` that says what it expected. What each part means is in `resilient_llm.stores.protocol`.
"""

from ._store_rates import RATE_CHECKS, MakeRateStore, RateCheck

__all__ = ["RATE_CHECKS", "MakeRateStore", "RateCheck"]
