"""A process that has no descriptor left says nothing about the target that it could not connect to."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace

import aiohttp
import httpx
import pytest

from resilient_llm.outcome import Outcome, Scope, Verdict
from resilient_llm.providers import classify_exception
from resilient_llm.transports.failures import ConnectError


def of_aiohttp(number: int) -> Exception:
    key = SimpleNamespace(host="x", port=1, ssl=None, is_ssl=False)
    return aiohttp.ClientConnectorError(key, OSError(number, "why"))  # type: ignore[arg-type]


def of_httpx(number: int) -> Exception:
    inner = OSError(number, "why")
    middle = RuntimeError("of a library in between")
    middle.__cause__ = inner
    outer = httpx.ConnectError("why")
    outer.__context__ = middle
    return outer


def of_ours(number: int) -> Exception:
    outer = ConnectError("why")
    outer.__cause__ = OSError(number, "why")
    return outer


def outcome_of(error: Exception) -> Outcome:
    outcome = classify_exception(error)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("make", [of_aiohttp, of_httpx, of_ours])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_it_is_ours_and_not_the_target_s(make: Callable[[int], Exception], number: int) -> None:
    outcome = outcome_of(make(number))
    assert (outcome.verdict, outcome.scope, outcome.retryable) == (Verdict.NEUTRAL, Scope.LOCAL, True)
    assert (outcome.error_type, outcome.timed_out) == ("too_many_open_files", False)
    refused = outcome_of(make(errno.ECONNREFUSED))
    assert (refused.verdict, refused.error_type) == (Verdict.FAILURE, "connect_error")
