"""How many second attempts a stream of calls may afford.

Counts calls and hedges, and no time: a service that is quiet saves as much by each call as a busy one. When a hedge
is worth having is not known here.
"""

from __future__ import annotations

__all__ = ["HedgeBudget"]


class HedgeBudget:
    """Allow hedges as a share of calls: each call saves `ratio` of one, and up to `burst` are kept.

    Of the first n calls at most `ratio * n + 1` are hedged, and of any n in a row at most `ratio * n + burst`: a new
    budget has one. Nothing ever waits: the answer is yes or no. Memory is constant.

    Raises `ValueError` for a `ratio` outside 0 to 1 or a `burst` below 1.

    Source: the token count of gRPC's retry throttling (proposal A6), which hedging draws on there too.
    """

    __slots__ = ("_burst", "_ratio", "_saved")

    def __init__(self, *, ratio: float, burst: int) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: allowed are ratios from 0 to 1")
        if burst < 1:
            raise ValueError(f"burst={burst!r}: allowed are counts from 1")
        self._ratio = ratio
        self._burst = burst
        self._saved = 1.0

    def deposit(self) -> None:
        """Count one call; not its attempts."""
        self._saved = min(self._burst, self._saved + self._ratio)

    @property
    def remaining(self) -> int:
        """Give the number of hedges that could be had now."""
        return int(self._saved + 1e-9)  # twenty times 0.05 is a little less than 1

    def withdraw(self) -> bool:
        """Take one hedge out of the budget, or answer `False` and take nothing."""
        if not self.remaining:
            return False
        self._saved -= 1
        return True
